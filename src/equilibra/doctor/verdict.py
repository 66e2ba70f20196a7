"""Verdicts: which transfer paths of the runtime will work here, from the findings alone.

| path | needs |
|---|---|
| collective | gloo; on a GPU for each process, NCCL carries the rows instead |
| host | gloo for what ranks tell each other, /dev/shm, and on GPUs that CUDA takes shared memory |
| ipc | gloo, CUDA IPC, stream values, and peer access between all GPUs where there are several |
| both | what ipc and host need |

Every path needs gloo, because counts, votes and hashes of plans always go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from equilibra.doctor.finding import Finding, PathState, State, Verdict

__all__ = ["RUNTIME_PATHS", "num_gpus", "summary_line", "verdicts"]

RUNTIME_PATHS = "transfer paths"
"""the finding that names the paths this version of the runtime has"""
USABLE = (State.OK, State.WARNING)


class _Findings:
    """Findings by name."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._of_name = {finding.name: finding for finding in findings}

    def state(self, name: str) -> State:
        found = self._of_name.get(name)
        return found.state if found else State.NOT_TESTED

    def usable(self, name: str) -> bool:
        return self.state(name) in USABLE

    def reason(self, name: str) -> str:
        found = self._of_name.get(name)
        return f"{name}: {found.text}" if found else f"{name}: not looked at"

    def first_unusable(self, names: Sequence[str]) -> Verdict | None:
        """What rules a path out: something missing before something not tested. The path is filled in later."""
        for state, path_state in ((State.MISSING, PathState.FAILS), (State.NOT_TESTED, PathState.NOT_TESTED)):
            for name in names:
                if self.state(name) is state:
                    return Verdict(path="", state=path_state, text=self.reason(name))
        return None


def num_gpus(findings: Sequence[Finding]) -> int:
    """GPUs that were found."""
    return sum("capability" in finding.values for finding in findings)


def verdicts(findings: Sequence[Finding]) -> list[Verdict]:
    """One per path."""
    found, gpus = _Findings(findings), num_gpus(findings)
    listed = next((finding.values.get("paths") for finding in findings if finding.name == RUNTIME_PATHS), None)
    judges: dict[str, Callable[[_Findings, int], Verdict]] = {
        "collective": _collective, "host": _host, "ipc": _ipc, "both": _both,
    }  # fmt: skip
    made = []
    for path, judge in judges.items():
        one = found.first_unusable(["torch", "gloo"]) or judge(found, gpus)
        made.append(_in_runtime(Verdict(path=path, state=one.state, text=one.text), listed))
    return made


def summary_line(made: Sequence[Verdict]) -> str:
    """All verdicts in one line."""
    words = {PathState.WORKS: "will work", PathState.FAILS: "will not work", PathState.NOT_TESTED: "not tested"}
    parts = []
    for state, word in words.items():
        if paths := [one.path for one in made if one.state is state]:
            parts.append(f"{', '.join(paths)} {word}")
    return f"transfer paths: {'; '.join(parts)}"


def _collective(found: _Findings, gpus: int) -> Verdict:
    if gpus == 0:
        return Verdict(path="", state=PathState.WORKS, text="over gloo, between processes without GPUs")
    if gpus == 1:
        return Verdict(path="", state=PathState.WORKS, text="over gloo, for processes that share the GPU; NCCL refuses "
                       "two processes on one GPU")  # fmt: skip
    if found.usable("nccl"):
        return Verdict(path="", state=PathState.WORKS, text=f"over NCCL, one process for each of {gpus} GPUs")
    return Verdict(path="", state=PathState.WORKS, text=f"over gloo only, which is slow ({found.reason('nccl')})")


def _host(found: _Findings, gpus: int) -> Verdict:
    needs = ["shared memory", "registering"] if gpus else ["shared memory"]
    if ruled_out := found.first_unusable(needs):
        return ruled_out
    little = found.state("shared memory") is State.WARNING
    text = "through /dev/shm" + (", registered with CUDA" if gpus else "")
    return Verdict(path="", state=PathState.WORKS, text=text + ("; there may be too little of it" if little else ""))


def _ipc(found: _Findings, gpus: int) -> Verdict:
    if gpus == 0:
        return Verdict(path="", state=PathState.FAILS, text="no GPU here")
    needs = ["cuda ipc", "stream values", *(["peer access"] if gpus > 1 else [])]
    if ruled_out := found.first_unusable(needs):
        return ruled_out
    text = f"between all {gpus} GPUs" if gpus > 1 else "between processes that share the GPU; between GPUs not tested"
    return Verdict(path="", state=PathState.WORKS, text=text)


def _both(found: _Findings, gpus: int) -> Verdict:
    needed = [_ipc(found, gpus), _host(found, gpus)]
    for state in (PathState.FAILS, PathState.NOT_TESTED):
        for one in needed:
            if one.state is state:
                return one
    return Verdict(path="", state=PathState.WORKS, text="ipc and the host link at once")


def _in_runtime(verdict: Verdict, listed: Collection[str] | None) -> Verdict:
    """A path that the machine could do but this version has not got will not work."""
    if listed is None or verdict.path in listed or verdict.state is PathState.FAILS:
        return verdict
    text = f"this version of the runtime has no such path (the machine: {verdict.text})"
    return Verdict(path=verdict.path, state=PathState.FAILS, text=text)
