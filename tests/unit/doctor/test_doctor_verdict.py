"""From findings to verdicts."""

import pytest

from equilibra.doctor.finding import Finding, PathState, State, num_gpus, summary_line, verdicts

WORKS, FAILS, UNKNOWN = PathState.WORKS, PathState.FAILS, PathState.NOT_TESTED
ALL = ["collective", "host", "ipc", "both"]
BASE = {"torch": State.OK, "gloo": State.OK, "shared memory": State.OK}
ON_GPU = {**BASE, "nccl": State.OK, "registering": State.OK, "cuda ipc": State.OK, "stream values": State.OK}


def findings(states: dict[str, State], *, gpus: int = 0, paths: list[str] | None = None) -> list[Finding]:
    made = [Finding(name=name, state=state, text=f"about {name}") for name, state in states.items()]
    made += [Finding(name=f"gpu {i}", state=State.OK, text="", values={"capability": [9, 0]}) for i in range(gpus)]
    made.append(
        Finding(name="transfer paths", state=State.OK, text="", values={"paths": ALL if paths is None else paths})
    )
    return made


TABLE = [
    # what differs, GPUs, collective, host, ipc
    ({}, 0, WORKS, WORKS, FAILS),
    ({"torch": State.MISSING}, 0, FAILS, FAILS, FAILS),
    ({"gloo": State.MISSING}, 0, FAILS, FAILS, FAILS),
    ({"gloo": State.MISSING}, 8, FAILS, FAILS, FAILS),
    ({"gloo": State.NOT_TESTED}, 0, UNKNOWN, UNKNOWN, UNKNOWN),
    ({"shared memory": State.MISSING}, 0, WORKS, FAILS, FAILS),
    ({"shared memory": State.WARNING}, 0, WORKS, WORKS, FAILS),
    ({}, 1, WORKS, WORKS, WORKS),
    ({"nccl": State.MISSING}, 1, WORKS, WORKS, WORKS),
    ({"registering": State.MISSING}, 1, WORKS, FAILS, WORKS),
    ({"registering": State.NOT_TESTED}, 1, WORKS, UNKNOWN, WORKS),
    ({"cuda ipc": State.MISSING}, 1, WORKS, WORKS, FAILS),
    ({"cuda ipc": State.WARNING}, 1, WORKS, WORKS, WORKS),
    ({"stream values": State.MISSING}, 1, WORKS, WORKS, FAILS),
    ({"stream values": State.MISSING, "cuda ipc": State.NOT_TESTED}, 1, WORKS, WORKS, FAILS),
    ({"peer access": State.OK}, 8, WORKS, WORKS, WORKS),
    ({"peer access": State.MISSING}, 8, WORKS, WORKS, FAILS),
    ({"nccl": State.MISSING, "peer access": State.OK}, 8, WORKS, WORKS, WORKS),
    ({}, 8, WORKS, WORKS, UNKNOWN),  # peer access was never looked at
]


@pytest.mark.parametrize(("changes", "gpus", "collective", "host", "ipc"), TABLE)
def test_verdicts(changes, gpus, collective, host, ipc):
    made = verdicts(findings({**(ON_GPU if gpus else BASE), **changes}, gpus=gpus))
    assert [one.path for one in made] == ALL
    both = next(state for state in (FAILS, UNKNOWN, WORKS) if state in (host, ipc))  # as good as the worse of them
    assert [one.state for one in made] == [collective, host, ipc, both]
    assert all(one.text for one in made)


def test_nothing_found_is_nothing_known():
    assert {one.state for one in verdicts([])} == {UNKNOWN}


def test_a_path_the_runtime_has_not_got_will_not_work():
    made = verdicts(findings(ON_GPU, gpus=1, paths=["collective", "host"]))
    assert [one.state for one in made] == [WORKS, WORKS, FAILS, FAILS]
    assert "no such path" in made[2].text
    assert "share the GPU" in made[2].text  # what the machine could do is still said


def test_a_verdict_names_what_is_missing():
    made = verdicts(findings({**ON_GPU, "registering": State.MISSING}, gpus=1))
    assert "about registering" in made[1].text
    slow = verdicts(findings({**ON_GPU, "nccl": State.MISSING}, gpus=2))[0]
    assert "gloo only" in slow.text


def test_gpus_are_counted_by_what_was_found():
    assert num_gpus(findings(BASE)) == 0
    assert num_gpus(findings(BASE, gpus=3)) == 3


def test_one_line():
    line = summary_line(verdicts(findings(BASE)))
    assert line == "transfer paths: collective, host will work; ipc, both will not work"
    assert summary_line(verdicts([])) == "transfer paths: collective, host, ipc, both not tested"
