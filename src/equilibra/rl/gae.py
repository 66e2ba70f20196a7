"""Generalised advantage estimation, also of answers that are not finished (T-PPO's extended GAE).

Symbols: A answer tokens so far, γ discount, λ decay, r_t reward on token t, V_t value of the state before token t, so
after the prompt and t answer tokens.

    δ_t = r_t + γ·V_{t+1} - V_t
    A_t = Σ_{i=t}^{A-1} (γλ)^(i-t) δ_i

V_A, of the state after the last token, is 0 if the answer is finished. If it goes on, that state was not valued: V_A is
taken as V_{A-1}. With γ = 1 the last token of an unfinished answer then has the advantage 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError

__all__ = ["advantages", "returns"]


def advantages(
    rewards_A: NDArray[np.float64], values_A: NDArray[np.float64], *, discount: float, decay: float, finished: bool
) -> NDArray[np.float64]:
    """[A] from the rewards and values of one answer."""
    if rewards_A.ndim != 1 or rewards_A.shape != values_A.shape:
        raise InputError(
            f"advantages need a reward and a value for each token, not {rewards_A.shape} and {values_A.shape}"
        )
    for name, value in (("discount", discount), ("decay", decay)):
        if not 0 <= value <= 1:
            raise InputError(f"the {name} of advantages must be from 0 to 1, not {value}")
    values = np.asarray(values_A, np.float64)
    after = np.append(values[1:], 0.0 if finished else values[-1:])[: values.size]
    deltas = rewards_A + discount * after - values
    found, running = np.empty(values.size), 0.0
    for t, delta in zip(range(values.size - 1, -1, -1), deltas[::-1].tolist(), strict=True):
        running = delta + discount * decay * running
        found[t] = running
    return found


def returns(advantages_A: NDArray[np.float64], values_A: NDArray[np.float64]) -> NDArray[np.float64]:
    """[A] what the value model learns: advantages (not whitened) plus the values they were made with."""
    return advantages_A + np.asarray(values_A, np.float64)
