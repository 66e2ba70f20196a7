"""Copies of experts: how they travel, where they are kept, how their gradients return."""
