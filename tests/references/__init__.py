"""Slow, obvious implementations that the fast ones are compared with. Plain Python, numpy and scipy."""
