"""`equilibra rollout`: subcommands about generating answers."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand and its own."""
    parser = commands.add_parser("rollout", help="plan a disaggregated rollout: attention here, experts there")
    kinds = parser.add_subparsers(dest="rollout", metavar="WHAT", required=True)
    _add_plan(kinds)


def _add_plan(kinds: Any) -> None:  # noqa: ANN401
    parser = kinds.add_parser("plan")
    parser.add_argument("--model", required=True)
    parser.add_argument("--attention-hardware", default="h200")
    parser.add_argument("--expert-hardware", default="h200")
    parser.add_argument("--latency-ms", type=float, required=True)
    parser.add_argument("--context", type=float, required=True)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    from equilibra.cost.files import load_model, load_prices
    from equilibra.cost.lengths import Context
    from equilibra.plan.deployment.question import Question, Side
    from equilibra.plan.deployment.search import best_colocated, best_disaggregated

    q = Question(
        model=load_model(arguments.model),
        attention=Side.of(load_prices(arguments.attention_hardware)),
        experts=Side.of(load_prices(arguments.expert_hardware)),
        context=Context(mean=arguments.context),
        latency_us=arguments.latency_ms * 1e3,
    )
    for plan in (best_disaggregated(q), best_colocated(q)):
        print(json.dumps(plan.to_json()))
    return 0
