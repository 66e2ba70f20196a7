"""How rewards become advantages, and which tokens are trained: one protocol and registry, a small file for each."""
