"""Compiles the kernels that tests use before several processes start to compile the same ones side by side.

Where numba's cache has them already, this takes seconds.
"""

import contextlib
import io
import sys

from equilibra.cli.main import main
from equilibra.execute.steps.planning import warm
from equilibra.plan.planner import planner_names

QUICK = ("--prompts", "8", "--answers", "2", "--tokens-per-microbatch", "8192", "--ranks-per-node", "4")


def everything() -> int:
    """Plan and simulate a small step with every planner, on one node and on two; the exit status."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for num_nodes in (1, 2):
            warm(num_nodes)
            words = ["simulate", "--nodes", str(num_nodes), *QUICK, "--planner", *planner_names()]
            if status := main(words):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(everything())
