"""The protocol of copies and gradients, in every order in which ranks, streams and threads can run."""

from dataclasses import replace

import pytest
from tests.protocol.cases import ENGINES, RUNS, Case, every_case
from tests.protocol.engines import RefusedError
from tests.protocol.faults import FAULTS
from tests.protocol.model import Compiled, Reached, System, explore, explore_values, random_order, values_of
from tests.protocol.real_device import RealDeviceRank


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_run_through_in_every_order(engine):
    for run in RUNS:
        for rendezvous in (True, False):
            report = explore(Case(engine=engine, plan="both ways", run=run, rendezvous=rendezvous).system())
            assert report.failure is None, f"{run}, {rendezvous}\n{report.failure}"
            assert report.states > 100
    for run in ("update", "recompute", "mini-batches"):
        report = explore(Case(engine=engine, plan="one way", run=run, turning=True, rendezvous=False).system())
        assert report.failure is None, f"{run}\n{report.failure}"


@pytest.mark.parametrize("engine", ENGINES)
def test_three_ranks_run_through_in_every_order(engine):
    for plan in ("chain", "all to one"):
        for run in ("log-prob", "update", "recompute", "mini-batches"):
            report = explore(Case(engine=engine, plan=plan, run=run, num_ranks=3).system())
            assert report.failure is None, f"{plan}, {run}\n{report.failure}"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_plans_run_through_in_every_order(engine, num_ranks):
    for case in every_case(engine, num_ranks):
        report = explore(case.system())
        assert report.failure is None, f"{case}\n{report.failure}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.engine}: {', '.join(fault.rules)}")
def test_a_seeded_fault_is_found_with_the_shortest_run_into_it(fault):
    assert explore(fault.case(seeded=False).system()).failure is None, "the control is not sound"
    if fault.found == "refused":
        with pytest.raises(RefusedError):
            fault.case().system()
        return
    report = explore(fault.case().system())
    assert report.failure is not None
    print(f"{', '.join(fault.rules)} ({fault.engine}, {fault.run}):\n{report.failure}")
    assert fault.found in report.failure.what
    if fault.found == "race":  # no level before had one, and all runs to a state are as long
        assert len(report.failure.run) == report.depth


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_in_the_state_makes_no_difference(engine):
    """Without races values follow from the steps done: the search that keeps memory sees as many states."""
    for run in ("log-prob", "both stages", "epochs"):
        case = Case(engine=engine, plan="both ways", run=run, rendezvous=False)
        report = explore(case.system())
        assert report.failure is None
        assert explore_values(case.system()) == (report.states, None)
    compiled = Compiled(Case(engine=engine, plan="both ways", run="recompute", rendezvous=False).system())
    assert all(values_of(compiled, random_order(seed)) is None for seed in range(20))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_that_queues_slowly_allows_nothing_new(engine):
    quick = Case(engine=engine, plan="one way", run="both stages", rendezvous=False)
    slow = Case(engine=engine, plan="one way", run="both stages", rendezvous=False, slow_host=True)
    found = explore(slow.system())
    assert found.failure is None
    assert found.states >= explore(quick.system()).states


@pytest.mark.parametrize("engine", ["host", "ipc", "in place"])
def test_the_real_device_engine_queues_what_the_model_has(engine):
    for run in RUNS:
        for plan, num_ranks in (("none", 2), ("both ways", 2), ("chain", 3), ("all to one", 3)):
            case = Case(engine=engine, plan=plan, run=run, num_ranks=num_ranks, depth=2, turning=True)
            real = replace(case, device_rank=RealDeviceRank).system()
            assert real.operations == case.system().operations, f"{run}, {plan}"
    assert explore(real).failure is None


@pytest.mark.parametrize("fault", ["no wait for taken", "no finish_sums", "no finish_reads"])
def test_an_engine_without_a_wait_is_not_the_real_one(fault):
    case = Case(engine="ipc", plan="both ways", run="update")
    real = replace(case, device_rank=RealDeviceRank).system()
    assert real.operations != replace(case, faults=frozenset([fault])).system().operations


def test_the_search_counts_every_order():
    system = System()
    for agent in "ab":
        for number in range(2):
            system.add(agent, f"step {number}")
    report = explore(system)
    assert (report.states, report.runs) == (9, 6)


def test_the_search_finds_a_race_a_circle_of_waits_and_a_wrong_value():
    racing = System()
    racing.add("a", "write", writes=(("x", 1),))
    racing.add("b", "read", reads=(("x", 1),))
    assert "race" in explore(racing).failure.what
    ordered = System()
    ordered.add("a", "write", writes=(("x", 1),))
    ordered.wait("b", *ordered.now("a"))
    ordered.add("b", "read", reads=(("x", 2),))
    assert "holds 1, not 2" in explore(ordered).failure.what
    circle = System()
    for agent, other in ("ab", "ba"):
        circle.wait(agent, Reached(other, 1))
        circle.add(agent, "signal", gives=Reached(agent, 1))
    assert "deadlock" in explore(circle).failure.what
