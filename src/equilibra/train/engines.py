"""Which engine answers: the embedded one, SGLang servers, or vLLM on the ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from equilibra.core.errors import InputError
from equilibra.integrations.hf import Replica
from equilibra.integrations.routing_formats import model_from_config
from equilibra.integrations.sglang.engine import Server, SGLangEngine, check_url
from equilibra.integrations.vllm.engine import VLLMEngine
from equilibra.rl.engine import Engine
from equilibra.train.config import TrainConfig

if TYPE_CHECKING:
    from equilibra.train.build import Parts

__all__ = ["build_engine", "check_engine"]

WEIGHTS = "engine-weights"
"""in the run folder: where weights are handed over, if the configuration says nothing else"""


def check_engine(config: TrainConfig) -> None:
    """An error now if the engine cannot be used, before anything is trained."""
    rollout = config.rollout
    if rollout.engine == "sglang":
        _addresses(rollout.server)
    if rollout.engine == "vllm":
        if find_spec("vllm") is None:
            raise InputError("rollout.engine is vllm, which is not installed here: install vLLM, or use another engine")
        if config.run.dtype == "float64":
            raise InputError("vLLM does not know float64: set run.dtype to bfloat16 or float32")
    if rollout.options and rollout.engine != "vllm":
        raise InputError(
            f"rollout.options are settings of vLLM, and rollout.engine is {rollout.engine}: leave them out"
        )


def _addresses(text: str) -> list[str]:
    found = [check_url(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise InputError("rollout.engine sglang needs a server: set rollout.server, as http://127.0.0.1:30000")
    return found


def build_engine(parts: Parts, run: Path | None) -> Engine:
    """The engine of this rank. run: the run's folder."""
    rollout, text, group = parts.config.rollout, parts.text, parts.patient
    if rollout.engine == "embedded":
        return Replica(parts.folder, dtype=parts.dtype, device=parts.device, end=text.end, pad=text.pad)
    if not rollout.weights_folder and run is None:
        raise InputError(f"the engine {rollout.engine} needs a folder for new weights: set rollout.weights_folder")
    folder = Path(rollout.weights_folder) if rollout.weights_folder else Path(str(run)) / WEIGHTS
    model = model_from_config(parts.folder.config.to_dict())
    files = {"config.json": parts.folder.config_file(parts.dtype), **text.files()}
    if rollout.engine == "vllm":
        return VLLMEngine(
            group, model, end=text.end, folder=folder, files=files, dtype=parts.config.run.dtype,
            options=rollout.options,
        )  # fmt: skip
    servers = [Server(url=url, timeout_s=rollout.server_timeout_s) for url in _addresses(rollout.server)]
    return SGLangEngine(
        servers=servers, group=group, model=model, vocabulary=parts.folder.config.vocab_size, end=text.end,
        folder=folder, files=files, dtype=parts.dtype,
    )  # fmt: skip
