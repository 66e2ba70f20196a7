"""The runtime, measured on two ranks."""
