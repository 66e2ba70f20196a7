"""Runs the MoE layers of a Megatron-Core GPTModel under plans. Megatron is imported on first use."""

from equilibra.integrations.executor.balancer import Step
from equilibra.integrations.megatron.balancer import Balancer, Prepared, balance
from equilibra.integrations.megatron.homes import ExpertParameter, expert_parameters
from equilibra.integrations.megatron.layer import balanced_layer_spec, by_micro_batch, masked, set_replay
from equilibra.integrations.megatron.verify import verify
from equilibra.integrations.packing import pack_sequences, routes_of
from equilibra.integrations.planned import MegatronSetting

__all__ = [
    "Balancer", "ExpertParameter", "MegatronSetting", "Prepared", "Step", "balance", "balanced_layer_spec",
    "by_micro_batch", "expert_parameters", "masked", "pack_sequences", "routes_of", "set_replay", "verify",
]  # fmt: skip
