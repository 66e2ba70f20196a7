"""Adapters to third-party software. Each one stands alone, and only they import its libraries."""
