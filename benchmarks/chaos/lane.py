"""Run cases one after another; each record is on disk before the next case begins."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.chaos.cases import Case, Shape, overrides
from benchmarks.chaos.program import Ended, Lane, start_server
from benchmarks.chaos.verdict import Numbers, numbers_of, record, verdict

DISK_BYTES = 16 << 20
NEW_NAMESPACE = 0x00020000
MODEL = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 300, "hidden_size": 16,
    "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 128, "tie_word_embeddings": True,
    "initializer_range": 0.08,
}  # fmt: skip


def own_disk(folder: Path) -> bool:
    """Mount a small disk at FOLDER/disk and private shared memory; False without permission to mount."""
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACE) != 0:
        return False
    commands = (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(disk)],
        ["mount", "-t", "tmpfs", "-o", "size=1g", "chaos", "/dev/shm"],
    )
    done = (subprocess.run(command, check=False, capture_output=True) for command in commands)
    return all(one.returncode == 0 for one in done)


@dataclass(frozen=True, kw_only=True)
class Series:
    """Cases in one folder, compared with undisturbed runs of their shapes."""

    folder: Path
    """scratch"""
    lane: Lane
    """where they run"""
    expected: dict[Shape, tuple[Numbers, float]] = field(default_factory=dict)
    """numbers and seconds of undisturbed runs, computed on first use"""

    def options(self, shape: Shape) -> list[str]:
        """Options of `equilibra train` for a new run."""
        model, problems = self.folder / "model", self.folder / "problems.jsonl"
        if not model.exists():
            model.mkdir()
            (model / "config.json").write_text(json.dumps(MODEL))
            lines = [json.dumps({"question": f"{a} + {b}?", "answer": str(a + b)}) for a in range(8) for b in range(8)]
            problems.write_text("\n".join(lines))
        reward = f"{Path(__file__).with_name('reward.py')}:spread"
        return ["--plain", "--output", str(self.lane.run), *overrides(shape, str(model), str(problems), reward)]

    def undisturbed(self, shape: Shape) -> tuple[Numbers, float]:
        """Numbers and seconds of an undisturbed run of this shape."""
        if shape not in self.expected:
            self.lane.clear()
            first, numbers = self._undisturbed(shape)
            second, again = self._undisturbed(shape)
            if numbers != again:
                raise RuntimeError("two undisturbed runs have other numbers")
            self.expected[shape] = numbers, min(first.seconds, second.seconds)
        return self.expected[shape]

    def _undisturbed(self, shape: Shape) -> tuple[Ended, Numbers]:
        self.lane.clear()
        ended = self.lane.train(self.options(shape))
        if ended.code != 0 or ended.leftovers:
            raise RuntimeError(f"an undisturbed run ended with {ended.code}: {ended.text}")
        steps = [json.loads(line) for line in (self.lane.run / "metrics.jsonl").read_text().splitlines()]
        needed = "copies" if shape.standing else "moves"
        if not any(step.get(needed) for step in steps):
            raise RuntimeError(f"runs of shape {shape.name} have no {needed}, so nothing could happen to them")
        return ended, numbers_of(self.lane.run)

    def run(self, case: Case) -> dict[str, object]:
        """Run a case: the disturbed run, the resumed run, and the verdict; the folder of a defect is kept."""
        expected, usual_s = self.undisturbed(case.shape)
        self.lane.clear()
        ended = self.lane.train(self.options(case.shape), case, usual_s)
        while ended.after_s is None and ended.code == 0 and numbers_of(self.lane.run) == expected:
            case = replace(case, stage="", share=case.share * 0.7)  # it ended before the injection: retry earlier
            self.lane.clear()
            ended = self.lane.train(self.options(case.shape), case, usual_s)
        kept = self._keep(case, "disturbed")
        resumed: Ended | None = None
        if ended.code != 0:
            again = (self.lane.run / "config.toml").is_file()
            arguments = ["--plain", "--resume", str(self.lane.run)] if again else self.options(case.shape)
            resumed = self.lane.train(arguments)
        last = ended if resumed is None else resumed
        numbers = numbers_of(self.lane.run) if last.code == 0 else None
        said = verdict(case, ended, resumed, numbers, expected)
        if said.startswith("defect"):
            self._keep(case, "resumed")
        else:
            shutil.rmtree(kept)
        return record(case, ended, resumed, said)

    def _keep(self, case: Case, name: str) -> Path:
        """Copy a run's output, log, metrics and notes."""
        kept = self.folder / "kept" / str(case.number)
        to = kept / name
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.lane.control, to / "control")
        for part in ("output", "log.txt", "metrics.jsonl"):
            path = self.lane.run / part
            if path.is_dir():
                shutil.copytree(path, to / part)
            elif path.exists():
                shutil.copy(path, to / part)
        return kept


def run_lane(cases: Iterable[Case], folder: Path, raw: Path) -> None:
    """Run cases and append their records to a file."""
    start_server()
    series = Series(folder=folder, lane=Lane(folder))
    for case in cases:
        line = json.dumps(series.run(case)) + "\n"
        file = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, line.encode())
        os.close(file)
