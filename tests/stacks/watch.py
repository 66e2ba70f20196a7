"""In a training worker: count the rows that enter each expert's forward, outside Equilibra's code, and make faults.

Every forward of an MoE layer appends a line to `$EQUILIBRA_TEST_ROWS/<rank>.jsonl`: step, pass, layer, and the rows
that entered this rank's experts, homes and copies alike. The ranks of an expert-parallel group run the same layers in
the same order, so the n-th lines of their files belong together. A step begins with the pass for old log-probabilities.
Its recorded routing is hashed to a line of `<rank>.routing`, and `<rank>.pid` has the worker's process id.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from tests.stacks import faults
from torch import Tensor
from torch.nn.modules import module as every_module


class Watch:
    """The pass that is running, and the rows of the layer that is running in it."""

    def __init__(self, folder: Path) -> None:
        from megatron.core.transformer.mlp import MLP
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self.folder, self.kinds = folder, (MLP, MoELayer)
        self.step, self.update, self.rows = 0, False, 0

    def note_routing(self, routed: Tensor) -> None:
        rank = torch.distributed.get_rank()
        (self.folder / f"{rank}.pid").write_text(str(os.getpid()))
        with (self.folder / f"{rank}.routing").open("a") as file:
            file.write(f"{zlib.crc32(routed.values().contiguous().numpy().tobytes())}\n")

    def before(self, module: Any, inputs: tuple[Any, ...]) -> None:
        expert, layer = self.kinds
        if isinstance(module, layer):
            self.rows = 0
        elif isinstance(module, expert):
            self.rows += len(inputs[0])

    def after(self, module: Any, _inputs: Any, _outputs: Any) -> None:
        if isinstance(module, self.kinds[1]):
            line = {"step": self.step, "update": self.update, "layer": module.layer_number, "rows": self.rows}
            with (self.folder / f"{torch.distributed.get_rank()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def install() -> None:
    """Once in a process."""
    if "EQUILIBRA_TEST_ROWS" not in os.environ or hasattr(install, "watch"):
        return
    watch = install.watch = Watch(Path(os.environ["EQUILIBRA_TEST_ROWS"]))
    every_module.register_module_forward_pre_hook(watch.before)
    every_module.register_module_forward_hook(watch.after)
    _follow_passes(watch)
    if faults.planned():  # other runs are left as they are: verl alone does not even import Equilibra
        _drop_gradients(watch)
        _shift_routing(watch)


def _follow_passes(watch: Watch) -> None:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    run = MegatronEngine.forward_backward_batch

    def followed(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        watch.step += forward_only
        watch.update = not forward_only
        if forward_only:
            watch.note_routing(data["routed_experts"])
        return run(self, data, loss_function, forward_only)

    MegatronEngine.forward_backward_batch = followed


def _drop_gradients(watch: Watch) -> None:
    from equilibra.integrations.megatron.copies import MegatronExperts

    add = MegatronExperts.add_gradient

    def dropped(self: Any, expert: int, *rows_P: Tensor) -> None:
        if not faults.happens(faults.GRADIENTS, step=watch.step):
            add(self, expert, *rows_P)

    MegatronExperts.add_gradient = dropped


def _shift_routing(watch: Watch) -> None:
    from verl.workers.engine.megatron import transformer_impl

    align = transformer_impl.align_r3_router_replay_data

    def shifted(layers_topk_idx: Tensor, input_ids: Tensor) -> Tensor:
        routed = align(layers_topk_idx, input_ids)
        if not faults.happens(faults.SHIFTED, step=watch.step):
            return routed
        return torch.nested.nested_tensor([one.roll(1, dims=1) for one in routed.unbind()], layout=torch.jagged)

    transformer_impl.align_r3_router_replay_data = shifted
