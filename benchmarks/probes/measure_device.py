"""Measure one CUDA device for the cost model: experts, dense products, attention, memory, the host link.

Needs torch alone. Writes measurements that `equilibra calibrate` fits:

    python benchmarks/probes/measure_device.py mine.json
    equilibra calibrate mine.json --base h200 --name mine --output mine.toml

Every figure is the median of `REPEATS` CUDA-event timings after a warm-up, with its quartiles. Cases are timed in a
shuffled order, so that heat and clocks favour no shape.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

Case = dict[str, Any]
REPEATS = 15
EXPERT_SHAPES = [  # hidden, FFN, instances on the rank
    (2048, 768, 4), (2048, 768, 8), (2048, 768, 16), (2048, 768, 32),
    (4096, 1536, 4), (4096, 1536, 8), (4096, 1536, 16),
    (7168, 2048, 4), (7168, 2048, 8),
    (2880, 2880, 4), (2880, 2880, 8),
    (4096, 1408, 8), (2048, 1024, 8), (2048, 1408, 8), (2048, 512, 16),
]  # fmt: skip
EXPERT_ROWS = (1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def clock(function: Callable[[], object], repeats: int = REPEATS) -> dict[str, float]:
    """Median and quartiles of a function's time in microseconds."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        if DEVICE == "cpu":
            function()
            times.append(1.0)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    times.sort()
    return {"us": times[len(times) // 2], "us_low": times[len(times) // 4], "us_high": times[3 * len(times) // 4]}


def experts(hidden: int, ffn: int, instances: int, rows: int) -> list[Case]:
    """A SwiGLU expert layer by grouped products, forward and backward."""
    x = torch.randn(rows, hidden, device=DEVICE, dtype=TYPE, requires_grad=True)
    first = (torch.randn(instances, hidden, 2 * ffn, device=DEVICE, dtype=TYPE) * 0.02).requires_grad_()
    second = (torch.randn(instances, ffn, hidden, device=DEVICE, dtype=TYPE) * 0.02).requires_grad_()
    ends = torch.linspace(0, rows, instances + 1)[1:].round().to(torch.int32).to(DEVICE)

    def forward() -> torch.Tensor:
        gate, up = torch._grouped_mm(x, first, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, second, offs=ends)

    gradient = torch.randn(rows, hidden, device=DEVICE, dtype=TYPE)

    def only_forward() -> None:
        with torch.no_grad():
            forward()

    out = forward()

    def only_backward() -> None:
        torch.autograd.grad(out, (x, first, second), gradient, retain_graph=True)

    case = {"kind": "experts", "hidden": hidden, "expert_ffn": ffn, "instances": instances, "rows": rows}
    return [
        {**case, "direction": "forward", **clock(only_forward)},
        {**case, "direction": "backward", **clock(only_backward)},
    ]


def dense(tokens: int, inner: int, outer: int) -> list[Case]:
    """One large matrix product."""
    x = torch.randn(tokens, inner, device=DEVICE, dtype=TYPE)
    weight = torch.randn(inner, outer, device=DEVICE, dtype=TYPE)
    case = {"kind": "dense", "tokens": tokens, "inner": inner, "outer": outer, "flop": 2 * tokens * inner * outer}
    return [{**case, **clock(lambda: x @ weight)}]


def attention(heads: int, size: int, length: int, sequences: int) -> list[Case]:
    """Causal attention, forward and backward."""
    shape = (sequences, heads, length, size)
    query, key, value = (torch.randn(shape, device=DEVICE, dtype=TYPE, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=DEVICE, dtype=TYPE)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def only_forward() -> None:
        with torch.no_grad():
            forward()

    out = forward()
    flop = 2 * heads * size * length**2 * sequences
    case = {"kind": "attention", "width": heads * size, "length": length, "sequences": sequences}
    return [
        {**case, "direction": "forward", "flop": flop, **clock(only_forward)},
        {**case, "direction": "backward", "flop": flop * 5 / 2,
         **clock(lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True))},
    ]  # fmt: skip


def permute(rows: int, hidden: int) -> list[Case]:
    """Rows gathered in another order: bytes read and written."""
    x = torch.randn(rows, hidden, device=DEVICE, dtype=TYPE)
    order = torch.randperm(rows, device=DEVICE)
    case = {"kind": "memory", "bytes": 2 * rows * hidden * x.element_size()}
    return [{**case, **clock(lambda: x.index_select(0, order))}]


def host_copy(num_bytes: int) -> list[Case]:
    """Pinned host memory to the device, and between two places of the device."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    device, other = (torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return [
        {"kind": "host_copy", "bytes": num_bytes, **clock(lambda: device.copy_(host, non_blocking=True))},
        {"kind": "device_copy", "bytes": num_bytes, **clock(lambda: other.copy_(device, non_blocking=True))},
    ]


def hidden_copy(hidden: int, ffn: int, instances: int, rows: int, copies: int) -> list[Case]:
    """How much longer the experts take while the weights of `copies` experts come in over the host link.

    With and without a copy in turn, since the clocks of the device drift by more than the difference.
    """
    if DEVICE == "cpu":
        return []
    x = torch.randn(rows, hidden, device=DEVICE, dtype=TYPE)
    first = torch.randn(instances, hidden, 2 * ffn, device=DEVICE, dtype=TYPE)
    second = torch.randn(instances, ffn, hidden, device=DEVICE, dtype=TYPE)
    ends = torch.linspace(0, rows, instances + 1)[1:].round().to(torch.int32).to(DEVICE)
    num_bytes = copies * 6 * hidden * ffn
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    slot = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    turns = 2 + int(num_bytes / 50e3 / (6 * hidden * ffn * rows / 500e6))  # longer than the copy

    def compute() -> None:
        for _ in range(turns):
            gate, up = torch._grouped_mm(x, first, offs=ends).chunk(2, dim=-1)
            torch._grouped_mm(F.silu(gate) * up, second, offs=ends)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            slot.copy_(host, non_blocking=True)
        compute()

    pairs = [(clock(compute, 1)["us"], clock(both, 1)["us"]) for _ in range(25)]
    lost = sorted(with_copy - alone for alone, with_copy in pairs)
    alone = sorted(one for one, _ in pairs)[len(pairs) // 2]
    copy = clock(lambda: slot.copy_(host, non_blocking=True))
    case = {"kind": "hidden_copy", "hidden": hidden, "expert_ffn": ffn, "rows": rows, "bytes": num_bytes}
    quarter = len(lost) // 4
    return [{**case, "us": alone + lost[len(lost) // 2], "us_alone": alone, "us_copy": copy["us"],
             "lost_low": lost[quarter], "lost_high": lost[-quarter - 1]}]  # fmt: skip


def main(path: str, *, quick: bool) -> None:
    """Measure everything, in a shuffled order."""
    rows = EXPERT_ROWS[:1] if quick else EXPERT_ROWS
    cases: list[tuple[Callable[..., list[Case]], tuple[int, ...]]] = [
        (experts, (*shape, n)) for shape in (EXPERT_SHAPES[:1] if quick else EXPERT_SHAPES) for n in rows
    ]
    sizes = ((512, 256, 256),) if quick else [
        (tokens, inner, outer) for tokens in (2048, 8192, 32_768)
        for inner, outer in ((2048, 5120), (4096, 2048), (4096, 9216), (8192, 4096), (7168, 18_432))
    ]  # fmt: skip
    cases += [(dense, size) for size in sizes]
    lengths = ((64, 1),) if quick else ((512, 16), (2048, 4), (8192, 1), (8192, 4), (32_768, 1))
    cases += [(attention, (heads, size, *length)) for heads, size in ((32, 128), (64, 64)) for length in lengths]
    cases += [(permute, (n, 2048)) for n in ((64,) if quick else (8192, 65_536, 262_144))]
    cases += [(host_copy, (n,)) for n in ((1024,) if quick else (2**20, 2**23, 2**25, 2**27, 2**29))]
    if not quick:
        shapes = (2048, 768, 16, 65_536), (4096, 1536, 16, 65_536), (2048, 768, 16, 16_384)
        cases += [(hidden_copy, (*shape, copies)) for copies in (1, 2, 4, 8, 16) for shape in shapes]
    if only := os.environ.get("ONLY"):
        cases = [case for case in cases if case[0].__name__ == only]
    random.Random(0).shuffle(cases)
    measured: list[Case] = []
    for number, (function, arguments) in enumerate(cases):
        print(f"{number + 1}/{len(cases)} {function.__name__} {arguments}", file=sys.stderr, flush=True)
        measured += function(*arguments)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    about = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "torch": torch.__version__,
             "dtype": str(TYPE), "repeats": REPEATS, "script": "benchmarks/probes/measure_device.py"}  # fmt: skip
    measured.sort(key=json.dumps)
    lines = ",\n  ".join(json.dumps(row) for row in measured)
    Path(path).write_text(f'{{"about": {json.dumps(about)},\n "measurements": [\n  {lines}\n ]}}\n')


if __name__ == "__main__":
    main(sys.argv[1], quick="--quick" in sys.argv)
