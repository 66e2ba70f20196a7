"""Nouns: immutable, self-checking values, and what every other room needs."""
