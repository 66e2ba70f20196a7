"""Imbalance, and events and run folders with one schema for predicted and measured figures."""
