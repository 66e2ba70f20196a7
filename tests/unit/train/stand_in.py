"""Workers that train nothing: what a rank may do, in seconds and without torch."""

import errno
import json
import os
import resource
import signal
import time
from pathlib import Path

from equilibra.core.errors import InputError, RankLostError


def rank() -> int:
    return int(os.environ["RANK"])


def _present(folder: Path) -> None:
    (folder / f"pid-{rank()}").write_text(str(os.getpid()))


def _all_present(folder: Path) -> None:
    while len(list(folder.glob("pid-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def checkpoint(folder: Path, step: int) -> None:
    if rank() == 0:
        (folder / "checkpoints" / "policy" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)


def trains(config, folder, *, resume, observer, stop, cut):
    """Learns a little in every step; ends after the step in which it is told to."""
    first = 0
    if resume:
        first = max(int(path.name[5:]) for path in (folder / "checkpoints" / "policy").glob("step-*"))
        observer.note(f"going on from step {first}")
    cut(first)
    (folder / f"environment-{rank()}.json").write_text(json.dumps(dict(os.environ)))
    for step in range(first, config.run.steps):
        observer.stage("rollout", step=step, done=1, total=2)
        if step % 2 == 0:
            observer.evaluated(step, {"reward_held_out": 0.1 + 0.1 * step})
        observer.step(step, {"reward": 0.1 * step, "imbalance": 1.0, "imbalance_static": 1.5, "seconds": 0.1})
        _present(folder)
        time.sleep(float(config.task.options.get("sleep_s", 0.0)))
        if stop():
            checkpoint(folder, step + 1)
            return
    checkpoint(folder, config.run.steps)


def one_raises(config, folder, **_):
    checkpoint(folder, 1)
    _present(folder)
    _all_present(folder)
    if rank() == 1:
        raise ValueError("boom")
    time.sleep(0.1)
    raise RankLostError("another rank is gone")


def one_is_killed(config, folder, **_):
    _present(folder)
    _all_present(folder)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    raise RankLostError("another rank is gone")


def one_exits(config, folder, **_):
    os._exit(7)


def one_hangs(config, folder, **_):
    _present(folder)
    _all_present(folder)
    if rank() == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    raise RankLostError("another rank is gone")


def one_is_stopped(config, folder, **_):
    """Rank 2 is stopped, rank 1 has not noticed yet, and rank 0 has."""
    _present(folder)
    _all_present(folder)
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank() == 1:
        time.sleep(600)
    raise RankLostError("another rank is gone")


def one_is_stopped_early(config, folder, **_):
    """Rank 1 is stopped, and the others wait for it where nothing limits it, as torch does while it makes groups."""
    _present(folder)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def one_is_paused(config, folder, **_):
    """Rank 1 is stopped for less than the timeout."""
    _present(folder)
    if rank() == 1:
        os.system(f"(sleep 0.3; kill -CONT {os.getpid()}) &")
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2.5)


def all_hang(config, folder, **_):
    _present(folder)
    time.sleep(600)


def one_never_ends(config, folder, **_):
    _present(folder)
    if rank() == 1:
        time.sleep(600)


def bad_input(config, folder, **_):
    raise InputError("task.name: no such task")


def full_disk(config, folder, **_):
    checkpoint(folder, 1)
    raise OSError(errno.ENOSPC, "No space left on device", str(folder / "file"))


def limited(config, folder, **_):
    """Can write no file any more, not even what it prints."""
    checkpoint(folder, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    print("kept until the end")
    (folder / "file").write_text("too much")


def loses_gradients_of_copies(*arguments, **options):
    """For `equilibra verify`: what copies contribute does not return home."""
    from equilibra.execute.experts.weights import ExpertWeights
    from equilibra.train.verify import run_verify

    ExpertWeights.add_gradient = lambda *_: None
    run_verify(*arguments, **options)
