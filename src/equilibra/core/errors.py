"""Every error Equilibra raises on purpose.

    EquilibraError
    ├── InputError            invalid user input: exit code 2
    │   ├── TraceFormatError  a recording is missing, truncated, corrupted or in another format
    │   ├── BudgetError       a plan needs more slots, tokens or bytes than allowed
    │   └── UnreadableError   a file exists but cannot be read now; its content may be fine
    ├── PlanError             a plan breaks an invariant: a bug, or a plan for another load
    └── ExecuteError          a step cannot continue, on any rank
        ├── MismatchError     plans, versions or settings differ between ranks, or weights between trainer and engine
        ├── NonFiniteError    a gradient or weight is NaN or infinite; nothing was changed or written
        ├── RankLostError     another rank died, failed, or exceeded the timeout
        ├── StaleError        weights changed without notice, so copies of them would be stale
        └── BrokenStateError  a migration was interrupted: state in memory is mixed, load the last checkpoint

A message says what was asked, with the values, what is required, and what to do.
"""


class EquilibraError(Exception):
    """Base of all errors that Equilibra raises on purpose."""


class InputError(EquilibraError, ValueError):
    """Invalid user input."""


class TraceFormatError(InputError):
    """A recording is missing, truncated, corrupted or in another format."""


class BudgetError(InputError):
    """A plan needs more slots, tokens or bytes than allowed."""


class UnreadableError(InputError):
    """A file exists but cannot be read now; its content may be fine."""


class PlanError(EquilibraError):
    """A plan breaks an invariant or was made for another load."""


class ExecuteError(EquilibraError):
    """A step cannot continue. Every rank raises one within the configured time."""


class MismatchError(ExecuteError):
    """Plans, versions or settings differ between ranks, or weights between the trainer and the rollout engine."""


class NonFiniteError(ExecuteError):
    """A gradient or weight is NaN or infinite; nothing was changed or written."""


class RankLostError(ExecuteError):
    """Another rank died, failed, or exceeded the timeout."""


class StaleError(ExecuteError):
    """Weights changed without notice, so copies of them would be stale."""


class BrokenStateError(ExecuteError):
    """A migration was interrupted: the state in memory is mixed and must not be used."""
