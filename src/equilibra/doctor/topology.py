"""What `nvidia-smi` knows: NVLink and the compute mode. A machine without the tool is not tested.

Both reports are for people and change between versions, so a line that does not look as expected is passed over.
"""

from __future__ import annotations

import re
import subprocess

from equilibra.doctor.finding import Finding, State, first_line, without_gpu

__all__ = ["check_nvlink", "check_sharing", "link_rates", "topology"]

TIMEOUT_S = 15
STYLE = re.compile(r"\x1b\[[0-9;]*m")
GPU = re.compile(r"GPU(\d+)$")
HEADING = re.compile(r"GPU (\d+):")
RATE = re.compile(r"Link (\d+):\s*([\d.]+)\s*GB/s")
LINK = re.compile(r"NV(\d+)$")


class ToolError(RuntimeError):
    """`nvidia-smi` is not there, or failed."""


def check_nvlink() -> Finding:
    """How the GPUs of this machine are connected."""
    if absent := without_gpu("nvlink"):
        return absent
    try:
        pairs = topology(_ask("topo", "-m"))
    except ToolError as error:
        return Finding(name="nvlink", state=State.NOT_TESTED, text=str(error))
    try:
        rates = link_rates(_ask("nvlink", "-s"))
    except ToolError:  # older drivers have no such report; the matrix is enough
        rates = {}
    return _nvlink(pairs, rates)


def check_sharing() -> Finding:
    """Whether several processes may use one GPU."""
    if absent := without_gpu("sharing a gpu"):
        return absent
    try:
        modes = {line.strip() for line in _ask("--query-gpu=compute_mode", "--format=csv,noheader").splitlines()} - {""}
    except ToolError as error:
        return Finding(name="sharing a gpu", state=State.NOT_TESTED, text=str(error))
    text = f"compute mode {', '.join(sorted(modes)) or 'unknown'}"
    if modes == {"Default"}:
        text += ": several processes may share a GPU over gloo or CUDA IPC; NCCL wants a GPU for each"
        return Finding(name="sharing a gpu", state=State.OK, text=text)
    advice = "start one process per GPU, or set the mode with nvidia-smi -c DEFAULT"
    return Finding(name="sharing a gpu", state=State.WARNING, text=text, advice=advice)


def topology(report: str) -> dict[tuple[int, int], str]:
    """By pair of GPUs: how they are connected (NV18, PIX, SYS, ...), from `nvidia-smi topo -m`."""
    columns: list[int] = []
    found: dict[tuple[int, int], str] = {}
    for line in STYLE.sub("", report).splitlines():
        words = line.split()
        gpus = [int(match[1]) for word in words if (match := GPU.match(word))]
        if not words or not gpus:
            continue
        row = GPU.match(words[0])
        if row is None or len(gpus) > 1 or not columns:
            columns = gpus  # the heading: names of columns only
            continue
        cells = words[1 : 1 + len(columns)]
        found |= {(int(row[1]), column): cell for column, cell in zip(columns, cells, strict=False) if cell != "X"}
    return found


def link_rates(report: str) -> dict[int, list[float]]:
    """By GPU: GB/s of each active link, from `nvidia-smi nvlink -s`."""
    found: dict[int, list[float]] = {}
    gpu: int | None = None
    for line in report.splitlines():
        if heading := HEADING.search(line):
            gpu = int(heading[1])
            found[gpu] = []
        elif gpu is not None and (rate := RATE.search(line)):
            found[gpu].append(float(rate[2]))
    return found


def _nvlink(pairs: dict[tuple[int, int], str], rates: dict[int, list[float]]) -> Finding:
    totals = {gpu: round(sum(links), 1) for gpu, links in rates.items() if links}
    said = f"; {min(totals.values()):g} GB/s a GPU and direction by its links" if totals else ""
    values = {
        "pairs": [{"from": a, "to": b, "by": by} for (a, b), by in sorted(pairs.items())],
        "gb_per_s_of_gpu": {str(gpu): total for gpu, total in totals.items()},
    }
    if not pairs:
        text = f"no pair of GPUs{said}"
        return Finding(name="nvlink", state=State.NOT_TESTED, text=text, values=values)
    linked = sum(LINK.match(by) is not None for by in pairs.values())
    kinds = ", ".join(sorted(set(pairs.values())))
    text = f"{linked} of {len(pairs)} pairs ({kinds}){said}"
    if linked == len(pairs):
        return Finding(name="nvlink", state=State.OK, text=text, values=values)
    advice = "copies between the others go over PCIe: they are slower, and the simulator should know (--write)"
    return Finding(name="nvlink", state=State.WARNING, text=text, advice=advice, values=values)


def _ask(*words: str) -> str:
    """What nvidia-smi answers."""
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            ["nvidia-smi", *words],  # noqa: S607 - wherever the driver put it
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ToolError("nvidia-smi is not here") from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"nvidia-smi did not answer within {TIMEOUT_S} s") from error
    except OSError as error:
        raise ToolError(f"nvidia-smi cannot be run: {first_line(error)}") from error
    if done.returncode != 0:
        raise ToolError(f"nvidia-smi ended with {done.returncode}: {first_line(done.stderr or done.stdout)}")
    return done.stdout
