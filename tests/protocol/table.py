"""The table of docs/protocol.md: `python -m tests.protocol.table` from the repository."""

from time import process_time

from tests.protocol.cases import ENGINES, every_case
from tests.protocol.model import explore

NAMES = {
    "collective": "collective",
    "host thread": "host, on CPUs",
    "host": "host, on GPUs",
    "ipc": "ipc",
    "in place": "ipc, one GPU",
}


def main() -> None:
    """Explore everything and print it."""
    print("| path | ranks | cases | states | largest case | orders of the largest | steps of a run | CPU time |")
    print("|---|---|---|---|---|---|---|---|")
    for num_ranks in (2, 3):
        for engine in ENGINES:
            began = process_time()
            reports = [explore(case.system()) for case in every_case(engine, num_ranks)]
            assert not any(report.failure for report in reports)
            largest = max(reports, key=lambda report: report.states)
            steps = [report.depth for report in reports]
            print(
                f"| {NAMES[engine]} | {num_ranks} | {len(reports)} | {sum(report.states for report in reports):,} "
                f"| {largest.states:,} | {largest.runs:.0e} | {min(steps)} to {max(steps)} "
                f"| {process_time() - began:.1f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
