"""Routing: recorded, stored, counted, synthesized.

routing   `Recording`, `RoutingTrace`: which experts each token went to
open      `load_trace`, `save_trace` for both file formats; the plain one, `.npz`
store     the format for large recordings, `.eqtrace`
count     loads of sequences and micro-batches, and how unbalanced they are on a cluster
synth     synthetic RL routing, and its knobs from a real recording; sampling: its kernels
"""
