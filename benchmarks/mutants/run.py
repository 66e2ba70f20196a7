"""Run tests in a fork of this process, with a module's source replaced."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType
from typing import Any

from benchmarks.mutants.sample import SOURCE

ROOT = SOURCE.parents[1]


def load_libraries(*, jit: bool) -> None:
    """Import everything that tests need and no mutant changes; with `jit` also the planner and its compiled kernels.

    jit: otherwise kernels run as plain Python. Call it before anything imports numba.
    """
    os.environ["NUMBA_DISABLE_JIT"] = "0" if jit else "1"
    import accelerate  # noqa: F401, PLC0415
    import hypothesis.extra.numpy  # noqa: F401, PLC0415
    import numba  # noqa: F401, PLC0415
    import scipy.optimize  # noqa: F401, PLC0415
    import torch  # noqa: PLC0415
    import torch._dynamo  # noqa: PLC0415
    import torch.distributed.checkpoint  # noqa: PLC0415
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401, PLC0415

    torch.set_num_threads(1)
    if jit:
        from tests.golden.test_plans import CASES  # noqa: PLC0415

        from equilibra.plan.planner import planner_named  # noqa: PLC0415

        for name in ("1x4 2+2 skewed free", "2x4 2+2 hot h200", "2x2 packed"):
            planner_named("equilibra").plan(CASES[name])


def _forget_planner() -> None:
    """Drop the planner and its importers from `sys.modules`, so that they are imported with the mutant."""
    for name in [name for name in sys.modules if name.startswith(("equilibra.plan", "tests."))]:
        del sys.modules[name]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a test run."""

    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds of passed tests"""
    failed: list[str] = field(default_factory=list)
    """failed tests; a process that died or never ended counts as one"""
    late: list[str] = field(default_factory=list)
    """failed tests that took too long"""
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """lines that tests ran, by file, if watched"""


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that replaces the source of one module."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ANN401, ARG002
        if name != self.name:
            return None
        inside = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, self.path, loader=self, submodule_search_locations=inside)

    def exec_module(self, module: ModuleType) -> None:
        """Run the source."""
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def tried(
    tests: Sequence[str],
    *,
    file: str = "",
    source: str = "",
    only: Mapping[str, float] | None = None,
    watch: bool = False,
    stop: bool = False,
    cpu_s: float,
    wall_s: float,
    limit_s: float,
) -> Outcome:
    """Run test files with src/equilibra/FILE replaced by `source`.

    only: these tests of the files, in this order, until one fails; with what they cost. watch: note lines that run.
    stop: at the first failure, as with `only`. cpu_s, wall_s: limits of one test. limit_s: of all of them.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setsid()
        try:
            found = _in_child(tests, file, source, only=only, watch=watch, stop=stop, cpu_s=cpu_s, wall_s=wall_s)
            told = json.dumps(found).encode()
            while told:
                told = told[os.write(writer, told) :]
        except BaseException:  # noqa: BLE001 - the mutant's, as likely as ours
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    end, said = monotonic() + limit_s, b""
    os.set_blocking(reader, False)
    done = False
    while not done and monotonic() < end:
        sleep(0.05)
        try:
            while piece := os.read(reader, 1 << 20):
                said += piece
            done = True
        except BlockingIOError:
            pass
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # with its children
    os.waitpid(pid, 0)
    os.close(reader)
    if not said:
        return Outcome(failed=["the process died" if done else "the process never ended"])
    return Outcome(**json.loads(said))


def _in_child(
    tests: Sequence[str], file: str, source: str, *, only: Mapping[str, float] | None, watch: bool, stop: bool,
    cpu_s: float, wall_s: float,
) -> dict[str, Any]:  # fmt: skip
    import pytest  # noqa: PLC0415

    from benchmarks.mutants.plugin import Plugin  # noqa: PLC0415

    quiet = os.open(os.environ.get("MUTANTS_OUTPUT", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if file:
        name = ".".join(["equilibra", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
        sys.meta_path.insert(0, _Replaced(name, SOURCE / file, source))
    if file.startswith("plan/"):
        _forget_planner()
    plugin = Plugin(cpu_s=cpu_s, wall_s=wall_s, only=only, watch=watch)
    os.chdir(ROOT)
    options = ["-q", "-W", "ignore:Module already imported", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-m", "not slow"]
    if stop or only is not None:
        options.append("-x")
    code = pytest.main([*options, *tests], plugins=[plugin])
    if code not in (0, 1, 5) and not plugin.failed:
        plugin.failed.append(f"collecting tests ended with {int(code)}")
    return {"seconds": plugin.seconds, "failed": plugin.failed, "late": plugin.late, "lines": plugin.lines}
