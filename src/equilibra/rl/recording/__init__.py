"""Rollouts on disk: recorded by one run, trained on by another with any number of ranks."""

from equilibra.rl.recording.rollouts import (
    RolloutAbout,
    convert_rollout,
    load_rollout,
    read_about,
    recorded_steps,
    save_rollout,
    to_trace,
)
from equilibra.rl.recording.sample_file import ModelShape, read_samples, write_samples

__all__ = [
    "ModelShape", "RolloutAbout", "convert_rollout", "load_rollout", "read_about", "read_samples", "recorded_steps",
    "save_rollout", "to_trace", "write_samples",
]  # fmt: skip
