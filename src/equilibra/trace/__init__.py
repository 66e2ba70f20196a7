"""Routing: recorded, stored, counted, made up.

routing     `Recording`, `RoutingTrace`: which experts each token went to
open        `load_trace`, `save_trace`: both file formats, by path
npz         the plain format; index, manifest, store, writer, atomic: the large one
count       loads of sequences and micro-batches
summary     what a recording holds, and how unbalanced it is on a cluster
synth, fit  synthetic RL routing, and its knobs from a real recording; sampling, totals: its kernels
"""
