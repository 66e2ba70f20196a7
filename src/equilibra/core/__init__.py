"""Immutable, self-checking values that every other package uses, and the errors they raise."""
