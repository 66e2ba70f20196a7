"""Does the rollout engine have the trainer's weights? Compare the log-probabilities of engine and trainer.

The log-prob stage replays the engine's routing under the trainer's weights, before the first update of the step. With
the same weights, the two log-probabilities of an answer token differ by rounding alone. Only this step's window is
compared: older tokens of an answer come from older weights.

The statistic is the mean of |difference| over all tokens of the step. A few outliers (experts chosen by a narrow
margin) hardly move it; stale weights do. Its limit is

    (PER_LAYER x u x sqrt(layers) + LAST x 2^-24) / min(1, temperature)

u: unit roundoff of the coarsest type involved (bfloat16 2^-8, float16 and TF32 2^-11, float32 2^-24). float64 counts as
float32, in which every model family computes some part, and float32 on GPUs as TF32, which engines multiply in. Each
layer rounds what it adds to the residual stream; these errors are independent, so they grow with the root of the number
of layers. The log-softmax is always float32. docs/training.md has measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from equilibra.core.errors import MismatchError
from equilibra.execute.group import ExpertGroup
from equilibra.rl.engine import Sample

PER_LAYER = 4.0
"""mean difference that one layer explains, in unit roundoffs"""
LAST = 16.0
"""error of the log-softmax in float32 roundoffs: log-probabilities reach -16, and the sum over the vocabulary rounds"""
TF32 = 2.0**-11
WHAT = "comparing log-probabilities with the engine's"


def unit_roundoff(dtype: torch.dtype, device: str) -> float:
    """Unit roundoff of products in this type. device: cpu or cuda."""
    finest = TF32 if device == "cuda" else 2.0**-24
    return max(torch.finfo(dtype).eps / 2, finest)


def mismatch_limit(roundoffs: Sequence[float], *, num_layers: int, temperature: float) -> float:
    """The largest mean difference that rounding explains. roundoffs: of engine and trainer."""
    return (PER_LAYER * max(roundoffs) * sqrt(num_layers) + LAST * 2.0**-24) / min(1.0, temperature)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Difference between engine and trainer in a step, over all ranks."""

    mean: float
    """mean |difference| of log-probabilities"""
    largest: float
    """largest |difference|"""
    num_tokens: int
    oldest: int
    """oldest version of weights that the engine answered with; `UNKNOWN`: not from this run"""
    newest: int
    """newest such version"""


def measure_mismatch(samples: Sequence[Sample], old: Sequence[NDArray[np.float64]], group: ExpertGroup) -> Mismatch:
    """Collective: compare the newest tokens of all ranks' samples with `old`, the trainer's log-probabilities."""
    pairs = [(sample, numbers) for sample, numbers in zip(samples, old, strict=True) if sample.segments]
    apart = [np.abs(numbers - sample.logprobs)[sample.fresh :] for sample, numbers in pairs]
    flat = np.concatenate([np.zeros(0), *apart])
    versions = [sample.segments[-1].version for sample, _ in pairs]
    extremes = [min(versions, default=0), max(versions, default=0), len(versions)]
    row = np.array([[flat.sum(), flat.size, flat.max(initial=0.0), *extremes]], np.float64)
    rows = np.concatenate(group.gather(row, what=WHAT)).astype(np.float64)
    known = rows[rows[:, 5] > 0]
    return Mismatch(
        mean=float(rows[:, 0].sum() / max(rows[:, 1].sum(), 1.0)), largest=float(rows[:, 2].max()),
        num_tokens=int(rows[:, 1].sum()), oldest=int(known[:, 3].min(initial=2**62)),
        newest=int(known[:, 4].max(initial=-1)),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class MismatchCheck:
    """Stops or warns when the engine does not have the trainer's weights."""

    limit: float
    """largest allowed mean difference"""
    stop: bool
    """True: raise an error; False: only warn"""
    say: Callable[[str], None]
    """prints a line"""

    def __call__(self, found: Mismatch, *, step: int, version: int) -> None:
        """Raise or warn if the engine answered with other weights than those of `version`."""
        reason = self._reason(found, version)
        if not reason:
            return
        text = f"step {step}: the rollout engine does not have the trainer's weights: {reason}"
        if self.stop:
            raise MismatchError(
                f"{text}. Nothing was trained on these answers. Look at what the engine printed when it loaded the "
                "weights; rollout.mismatch=warn goes on, rollout.mismatch_limit allows more"
            )
        self.say(f"warning: {text}")

    def _reason(self, found: Mismatch, version: int) -> str:
        if not found.num_tokens:
            return ""
        if (found.oldest, found.newest) != (version, version):
            other = found.oldest if found.oldest != version else found.newest
            said = f"weights of version {other}" if other >= 0 else "weights that this run did not hand over"
            return f"it answered with {said}, but was given version {version} (was it restarted?)"
        if found.mean <= self.limit:
            return ""
        return (
            f"log-probabilities of {found.num_tokens:,} answer tokens differ from the trainer's by {found.mean:.2g} on "
            f"average (at most {found.largest:.2g}), rounding explains {self.limit:.2g}. It kept older weights, loaded "
            "only some of the tensors, or computes in lower precision than the run assumes"
        )
