"""Every error Equilibra raises on purpose.

    EquilibraError
    ├── InputError            what the user handed in cannot be used: exit code 2
    │   ├── TraceFormatError  a recording is missing, truncated, corrupted or of another format
    │   └── BudgetError       a plan would need more slots, tokens or bytes than allowed
    └── PlanError             a plan breaks an invariant: a bug, or a plan for another load

A message says what was asked, with the values, what is required, and what to do.
"""

__all__ = ["BudgetError", "EquilibraError", "InputError", "PlanError", "TraceFormatError"]


class EquilibraError(Exception):
    """Root of the tree: catch this to catch everything Equilibra raises on purpose."""


class InputError(EquilibraError, ValueError):
    """What the user handed in cannot be used."""


class TraceFormatError(InputError):
    """A recording is missing, truncated, corrupted or of another format."""


class BudgetError(InputError):
    """A plan would need more slots, tokens or bytes than allowed."""


class PlanError(EquilibraError):
    """A plan breaks an invariant, or belongs to another load."""
