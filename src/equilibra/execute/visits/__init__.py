"""One pass of a micro-batch through a layer: which row goes where."""
