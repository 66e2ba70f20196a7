"""Where to put attention and where experts while decoding: how many ranks of which hardware, in which batches."""
