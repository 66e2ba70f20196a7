"""Whole training steps, measured on two ranks."""
