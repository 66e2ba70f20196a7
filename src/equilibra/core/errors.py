"""Every error Equilibra raises on purpose.

    EquilibraError
    ├── InputError            what the user handed in cannot be used: exit code 2
    │   ├── TraceFormatError  a recording is missing, truncated, corrupted or of another format
    │   ├── BudgetError       a plan would need more slots, tokens or bytes than allowed
    │   └── UnreadableError   a file is there and the operating system cannot read it now: it may be good
    ├── PlanError             a plan breaks an invariant: a bug, or a plan for another load
    └── ExecuteError          a step cannot go on, on any rank
        ├── MismatchError     ranks hold different plans, versions or settings, or the rollout engine other weights
        ├── NonFiniteError    a gradient or a weight is NaN or infinite: nothing was changed or written
        ├── RankLostError     another rank is gone, failed, or was slower than the timeout
        ├── StaleError        weights changed without notice: copies of them would be stale
        └── BrokenStateError  a migration was cut off: the state in memory is mixed, load the last checkpoint

A message says what was asked, with the values, what is required, and what to do.
"""

__all__ = [
    "BrokenStateError",
    "BudgetError",
    "EquilibraError",
    "ExecuteError",
    "InputError",
    "MismatchError",
    "NonFiniteError",
    "PlanError",
    "RankLostError",
    "StaleError",
    "TraceFormatError",
    "UnreadableError",
]


class EquilibraError(Exception):
    """Root of the tree: catch this to catch everything Equilibra raises on purpose."""


class InputError(EquilibraError, ValueError):
    """What the user handed in cannot be used."""


class TraceFormatError(InputError):
    """A recording is missing, truncated, corrupted or of another format."""


class BudgetError(InputError):
    """A plan would need more slots, tokens or bytes than allowed."""


class UnreadableError(InputError):
    """A file is there, and the operating system cannot read it now. It may be good: that is not known."""


class PlanError(EquilibraError):
    """A plan breaks an invariant, or belongs to another load."""


class ExecuteError(EquilibraError):
    """A step cannot go on. Every rank gets one, within the configured time."""


class MismatchError(ExecuteError):
    """Ranks hold different plans, versions or settings, or the rollout engine has other weights than the trainer."""


class NonFiniteError(ExecuteError):
    """A gradient or a weight is NaN or infinite; nothing was changed or written because of it."""


class RankLostError(ExecuteError):
    """Another rank is gone, failed, or was slower than the timeout."""


class StaleError(ExecuteError):
    """Weights changed without notice, so copies of them would be stale."""


class BrokenStateError(ExecuteError):
    """A migration was cut off: the state in memory is mixed and must not be used."""
