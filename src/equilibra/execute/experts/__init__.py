"""Experts of a layer on one rank: their shapes, weights and mathematics."""
