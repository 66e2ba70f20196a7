"""The section of the configuration about answers: who generates them, how many, how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from equilibra.core.checks import check_choice, check_flag, check_number, check_table, check_text, check_whole

__all__ = ["ENGINES", "Option", "RolloutConfig"]

ENGINES = ("embedded", "sglang", "vllm")
Option = str | int | float | bool
"""a value of `task.options`, `rollout.options` and `algorithm.options`"""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are generated."""

    engine: str = "embedded"
    """who generates: embedded (batched sampling on the training ranks), sglang (servers) or vllm (on the ranks)"""
    prompts: int = 32
    """problems of a step, over all ranks, from 1 on"""
    answers: int = 8
    """answers to each problem, from 1 on"""
    max_prompt_tokens: int = 64
    """longest prompt, in tokens, from 1 on; a problem with a longer one is an error"""
    max_answer_tokens: int = 8
    """longest answer, in tokens, from 1 on; longer ones are cut off"""
    reward_cut_off: bool = False
    """true: answers that were cut off are rewarded for what they say; false: they get no reward"""
    temperature: float = 1.0
    """of sampling, more than 0"""
    window: int = 0
    """answer tokens that a step generates at most, the rest follows in later steps (T-PPO); 0: whole answers"""
    server: str = ""
    """sglang: address of the server, http://127.0.0.1:30000, or of several with commas, which ranks ask in turn"""
    server_timeout_s: float = 600.0
    """sglang: seconds for a batch of answers, for new weights, and for a server that is starting, more than 0"""
    timeout_s: float = 0.0
    """seconds that ranks wait for each other's rollouts and for engines that load weights, from 0 on; 0: those of run
    and twice those of a server (run.timeout_s + 2 x rollout.server_timeout_s)"""
    weights_folder: str = ""
    """sglang and vllm: folder that hands over new weights, seen by all; empty: engine-weights in the run folder"""
    mismatch: str = "stop"
    """when the engine's log-probabilities show other weights than the trainer's: stop the run, or warn and go on"""
    mismatch_limit: float = 0.0
    """mean difference of log-probabilities that is allowed, from 0 on; 0: what the number types explain"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """vllm: further settings of vllm.LLM, as gpu_memory_utilization = 0.4"""

    def __post_init__(self) -> None:
        check_choice("rollout.engine", self.engine, ENGINES)
        for name in ("prompts", "answers", "max_prompt_tokens", "max_answer_tokens"):
            check_whole(f"rollout.{name}", getattr(self, name), low=1)
        check_number("rollout.temperature", self.temperature, above=0, high=1e3)
        check_whole("rollout.window", self.window, low=0)
        check_flag("rollout.reward_cut_off", self.reward_cut_off)
        for name in ("server", "weights_folder"):
            check_text(f"rollout.{name}", getattr(self, name), empty=True)
        check_number("rollout.server_timeout_s", self.server_timeout_s, above=0, high=1e6, below=True)
        check_number("rollout.timeout_s", self.timeout_s, high=1e6, below=True)
        check_choice("rollout.mismatch", self.mismatch, ("stop", "warn"))
        check_number("rollout.mismatch_limit", self.mismatch_limit)
        check_table("rollout.options", self.options)
