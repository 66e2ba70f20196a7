"""The two processes of the training bench, started and listened to as those of the runtime bench."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

from equilibra.bench.runtime.case import CLUSTER
from equilibra.bench.runtime.processes import (
    KEEP_MEMORY,
    _end_with_parent,
    _environment,
    _Failure,
    _listen,
    cores_for_ranks,
)
from equilibra.bench.train.setting import TrainSetting
from equilibra.core.errors import EquilibraError, InputError, RankLostError

__all__ = ["run_on_ranks"]


def run_on_ranks(setting: TrainSetting, tell: Callable[[str], None]) -> dict[str, Any]:
    """What rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    cores = cores_for_ranks()
    shared = {**KEEP_MEMORY, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="equilibra-bench-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            with _environment(shared):
                for rank in range(CLUSTER.num_ranks):
                    mine, theirs = context.Pipe(duplex=False)
                    core = None if cores is None else cores[rank]
                    process: BaseProcess = context.Process(
                        target=_rank, args=(rank, core, folder, theirs, setting), daemon=True
                    )
                    process.start()
                    theirs.close()
                    ranks.append((process, mine))
            return _listen(ranks, tell)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()


def _rank(rank: int, core: int | None, folder: str, pipe: Connection, setting: TrainSetting) -> None:
    """The life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    Thread(target=_end_with_parent, daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, {core})  # before torch and gloo start threads, which inherit it
    try:
        pipe.send(_measured(rank, Path(folder), setting, pipe.send if rank == 0 else lambda _line: None))
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        known = isinstance(error, EquilibraError)
        pipe.send(_Failure(
            kind=type(error).__name__, text=str(error) if known else repr(error),
            is_input=isinstance(error, InputError), is_echo=isinstance(error, RankLostError),
        ))  # fmt: skip
    pipe.close()
    os._exit(0)  # a lost peer must not keep the process in gloo's destructors


def _measured(rank: int, folder: Path, setting: TrainSetting, tell: Callable[[str], None]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415

    from equilibra.bench.train.model import write_model_folder  # noqa: PLC0415
    from equilibra.bench.train.rank import measure  # noqa: PLC0415
    from equilibra.execute.group import join_expert_group  # noqa: PLC0415

    torch.set_num_threads(1)
    own = folder / f"rank-{rank}"
    own.mkdir()
    write_model_folder(setting, own)
    timeout = timedelta(seconds=setting.timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=CLUSTER.num_ranks, timeout=timeout
    )
    result = measure(setting, own, join_expert_group(CLUSTER, timeout_s=setting.timeout_s), tell)
    result["torch"] = torch.__version__
    return result
