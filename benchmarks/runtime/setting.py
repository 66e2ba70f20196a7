"""Settings of the runtime bench: shapes that fit the machine, and cases from recordings or synthetic routing.

The default cases are real: dsv2-lite-law and gpt-oss-20b as recorded, and gpt-oss-20b where static placement is worst.
On two ranks real micro-batches in file order are nearly even, because each rank has half of all experts: at 4,096
tokens the imbalance is 1.07 to 1.09 on average and 1.35 at most. The most skewed sequences of a layer reach 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from benchmarks.problems import static_imbalance
from benchmarks.runtime.case import CLUSTER, Case, Select, Shape, case_of
from equilibra.core.errors import BudgetError, InputError
from equilibra.trace.open import load_trace
from equilibra.trace.routing import Recording
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

SKEWED_FROM = 1.5
"""static imbalance from which a speedup is asked for"""
TOKENS, HIDDEN, FFN, LAYERS = 4096, 512, 512, 2
"""default sizes: experts take most of a step, and a step takes seconds"""
QUICK_TOKENS, QUICK_HIDDEN, QUICK_FFN = 256, 64, 64
SHARED_MEMORY = Path("/dev/shm")
MOST_BYTES = 4 << 30
"""limit of weights and gradients for default shapes"""


@dataclass(frozen=True, kw_only=True)
class RuntimeSetting:
    """What to run; None: chosen for the recording."""

    tokens: int | None = None
    """tokens per micro-batch, both ranks together"""
    micro_batches: int = 2
    """micro-batches per step"""
    layers: int | None = None
    """MoE layers"""
    hidden: int | None = None
    """width of a token"""
    ffn: int | None = None
    """inner width of an expert"""
    repeats: int = 7
    """timed rounds"""
    spare_slots: int = 2
    """flash copies a rank can hold"""
    path: str | None = None
    """path of flash copies; None: the host path if shared memory has room for it"""
    patience: int = 60
    """seconds per case for waiting until other programs are quiet and running disturbed steps again"""
    seed: int = 0
    """seed of weights and hidden states"""
    quick: bool = False
    """small: to see that it runs, not to report"""

    def shape_for(self, case: Case) -> Shape:
        """The layer's widths: as set, or as large as memory allows."""
        hidden, ffn = (
            self.hidden or (QUICK_HIDDEN if self.quick else HIDDEN),
            self.ffn or (QUICK_FFN if self.quick else FFN),
        )
        experts = case.load.num_experts * case.load.num_layers
        num_bytes = 3 * hidden * ffn * 4 * experts * 3  # weights, gradients, and once more to compare gradients
        while self.hidden is None and self.ffn is None and num_bytes > MOST_BYTES and hidden > 64:
            hidden, ffn, num_bytes = hidden // 2, ffn // 2, num_bytes // 4
        free = _free_bytes()
        if free is not None and num_bytes > free:
            raise BudgetError(
                f"{experts} experts of {hidden} x {ffn} need {num_bytes / 2**30:.1f} GiB on both ranks, "
                f"{free / 2**30:.1f} GiB are free: use smaller --hidden, --ffn or --layers"
            )
        path = self.path or _path_for(case, self.spare_slots, expert_bytes=3 * hidden * ffn * 4)
        return Shape(
            hidden=hidden, ffn=ffn, spare_slots=self.spare_slots, path=path, repeats=self.repeats,
            patience_s=self.patience, seed=self.seed,
        )  # fmt: skip


def _path_for(case: Case, spare_slots: int, *, expert_bytes: int) -> str:
    """The host path, unless /dev/shm is too small for its largest segment (docker's default is 64 MiB)."""
    copies = CLUSTER.num_ranks * spare_slots
    published = case.load.num_layers * min(case.load.num_experts, case.load.num_micro_batches * copies)
    room = disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return "host" if (published + 2 * copies) * expert_bytes < room else "collective"


def _free_bytes() -> int | None:
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def cases_for(
    setting: RuntimeSetting, *, trace: Path | None, select: Select, traces: Path | None
) -> tuple[list[Case], list[str]]:
    """Cases of the named recording, of a folder's, or of synthetic routing; also what is left out."""
    if trace is not None:
        return [_case(setting, load_trace(trace), trace.name.removesuffix(trace.suffix), select)], []
    cases, left_out = [], []
    for name, selects in (
        ("dsv2-lite-law", [Select.EVEN]),
        ("gpt-oss-20b", [Select.EVEN, Select.SKEWED]),
    ):
        if traces is None or not (traces / f"{name}.npz").is_file():
            left_out.append(name)
            continue
        recording = load_trace(traces / f"{name}.npz")
        cases += [_case(setting, recording, name, select) for select in selects]
    if traces is not None and not cases:
        raise InputError(
            f"{traces} has none of {', '.join(f'{name}.npz' for name in left_out)}; name a file with --trace"
        )
    if not cases:
        cases.append(_case(setting, _synthetic(0.7), "synthetic", Select.EVEN))
    if not any(static_imbalance(case.load, CLUSTER.num_ranks)["of_step"] >= SKEWED_FROM for case in cases):
        cases.append(_case(setting, _synthetic(2.5), "synthetic skew", Select.SKEWED))
    return cases, left_out


def _synthetic(skew: float) -> Recording:
    """Synthetic routing shaped as DeepSeek-V2-Lite's, with the skew that its name says."""
    size = SynthShape(num_prompts=24, answers_per_prompt=4, num_layers=4, num_experts=64, top_k=6)
    return synthesize(size, SynthKnobs(popularity_skew=skew, median_length=300.0, max_length=1000), seed=1)


def _case(setting: RuntimeSetting, recording: Recording, name: str, select: Select) -> Case:
    """The case with the requested micro-batches, as large as requested or as the recording allows."""
    known = recording.num_tokens - recording.tokens_without_routing
    tokens = setting.tokens or max(min(QUICK_TOKENS if setting.quick else TOKENS, known // setting.micro_batches), 2)
    layers = setting.layers or (min(LAYERS, recording.num_layers) if select is Select.EVEN else 1)
    return case_of(
        recording, name, tokens=tokens, num_micro_batches=setting.micro_batches, num_layers=layers, select=select
    )
