"""One MoE layer: what it computes, on one rank or many."""
