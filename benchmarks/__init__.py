"""Measurements of this package itself: problems, timed solves, and the results files."""
