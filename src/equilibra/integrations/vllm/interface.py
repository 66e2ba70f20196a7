"""What both engines use of vLLM: versions that work, the worker extension, sampling parameters."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import Any

from equilibra.core.errors import InputError
from equilibra.rl.engine import Request, seed_of

__all__ = ["EXTENSION", "check_version", "import_vllm", "sampling_of"]

EXTENSION = "equilibra.integrations.vllm.worker.WeightUpdate"
"""vLLM's `worker_extension_cls`, which puts new weights into live models"""
OLDEST, OLDEST_ON_CPUS, NEWEST = (0, 28), (0, 30), (0, 30)


def import_vllm() -> Any:  # noqa: ANN401 - vLLM has its own types
    """Import vLLM for use inside a training rank, or say which one must be installed."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read on import; ranks may not have children
    try:
        library = import_module("vllm")
        import_module("vllm.platforms")
    except ImportError as error:
        raise InputError(
            f"rollout.engine vllm needs vLLM, which is not installed ({error}): install it, or choose another engine"
        ) from error
    check_version(str(getattr(library, "__version__", "unknown")), cpu=library.platforms.current_platform.is_cpu())
    return library


def check_version(version: str, *, cpu: bool = False) -> None:
    """Refuse a vLLM that these integrations do not fit. cpu: whether it is the CPU build."""
    found = re.match(r"(\d+)\.(\d+)\.", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if number > NEWEST:
        reason = "since 0.31 it returns routed experts only under Model Runner V2, with which this was never run"
    elif number < OLDEST:
        reason = "its interface for new weights is another one"
    elif cpu and number < OLDEST_ON_CPUS:
        reason = "before 0.30 its CPU build cannot return routed experts"
    else:
        return
    raise InputError(f"vLLM {version} is not supported: {reason}; install 0.30 (on GPUs 0.28 or 0.29 will do too)")


def sampling_of(request: Request, *, temperature: float, end: int) -> dict[str, Any]:
    """Sampling parameters of a request, as vLLM names them. end: token that ends an answer."""
    return {
        "n": 1, "temperature": temperature, "max_tokens": request.max_new, "seed": seed_of(request), "logprobs": 0,
        "stop_token_ids": [end], "ignore_eos": True, "detokenize": False,
    }  # fmt: skip
