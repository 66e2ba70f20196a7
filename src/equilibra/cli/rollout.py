"""`equilibra rollout`: generate answers, or plan the machines that do."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibra.cli.arguments import check_target, named_like, number
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from equilibra.cost.decode import Context
    from equilibra.integrations.hf import ModelFolder, Text
    from equilibra.plan.deployment.question import Plan


def add_parser(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "rollout",
        help="plan or run a rollout with attention and experts on different devices",
        description="Disaggregated rollout: attention on some devices, experts on others, micro-batches between them.",
    )
    kinds = parser.add_subparsers(dest="rollout", metavar="WHAT", required=True)
    _add_plan(kinds)
    _add_run(kinds)


# --- plan ---


def _add_plan(kinds: Any) -> None:  # noqa: ANN401
    parser = kinds.add_parser(
        "plan",
        help="how many devices for attention, how many for experts, and which batch?",
        description="Searches tensor-parallel sizes, node counts, micro-batches and batch sizes for the deployment "
        "that decodes most tokens per GPU or per cost within a latency limit, and compares it with the best colocated "
        "one. Times are modelled.",
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="preset, .toml or config.json")
    parser.add_argument("--attention-hardware", default="h200", metavar="NAME", help="preset or .toml (h200)")
    parser.add_argument("--expert-hardware", metavar="NAME", help="preset or .toml (default: that of attention)")
    parser.add_argument("--latency-ms", type=float, required=True, metavar="X", help="longest time between two tokens")
    lengths = parser.add_argument_group("sequence lengths in the batch (give one of the first three)")
    lengths.add_argument("--context", type=float, metavar="N", help="tokens in the cache of every sequence")
    lengths.add_argument("--answer-median", type=float, metavar="N", help="median of lognormal answer lengths; the "
                         "batch is kept full")  # fmt: skip
    lengths.add_argument("--lengths", metavar="FILE", help="answer lengths: .json (a list, or percentiles), or a "
                         "routing recording")  # fmt: skip
    lengths.add_argument("--answer-sigma", type=float, metavar="S", help="with --answer-median: spread of log-length "
                         "(0.8)")  # fmt: skip
    lengths.add_argument("--answer-limit", type=float, metavar="N", help="with --answer-median: longest answer")
    lengths.add_argument("--prompt", type=float, metavar="N", help="prompt tokens; not with --context (0)")
    search = parser.add_argument_group("search")
    number(search, "--gpus", 64, "N", "most GPUs, both sides together")
    number(search, "--micro-batches", 4, "M", "most micro-batches in flight")
    number(search, "--imbalance", 1.0, "X", "load of the busiest expert node over the mean", kind=float)
    search.add_argument("--objective", choices=("gpu", "cost"), help="what to maximise: throughput per GPU or per cost "
                        "(default: cost if the two sides differ)")  # fmt: skip
    for side in ("attention", "expert"):
        search.add_argument(f"--{side}-cost", type=float, metavar="C", help="cost of its GPU per hour, in any unit")
    search.add_argument("--law", metavar="FILE", help="decode constants of an H200 by benchmarks.probes.measure_decode")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--report", nargs="?", const="equilibra-deployment.html", metavar="FILE.html",
                     help="write the answer as a page")  # fmt: skip
    out.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    from equilibra.cost.decode import load_law
    from equilibra.cost.presets import load_model, load_prices
    from equilibra.plan.deployment.answer import answer
    from equilibra.plan.deployment.question import Question, Side

    if arguments.report is not None:
        check_target(arguments.report, overwrite=arguments.overwrite)
    law = None if arguments.law is None else load_law(Path(arguments.law))
    attention = experts = load_prices(arguments.attention_hardware)
    if arguments.expert_hardware is not None:
        experts = load_prices(arguments.expert_hardware)
    same = attention == experts and arguments.attention_cost == arguments.expert_cost
    question = Question(
        model=load_model(arguments.model),
        attention=Side.of(attention, of_h200=law, cost_per_hour=arguments.attention_cost),
        experts=Side.of(experts, of_h200=law, cost_per_hour=arguments.expert_cost),
        context=_context(arguments),
        latency_us=arguments.latency_ms * 1e3,
        max_ranks=arguments.gpus,
        max_micro_batches=arguments.micro_batches,
        imbalance=arguments.imbalance,
        objective=arguments.objective or ("gpu" if same else "cost"),
    )
    found = answer(question)
    said = found.to_json()
    if arguments.json:
        print(json.dumps(said))
    else:
        _print(said, found.disaggregated, found.colocated)
    sys.stdout.flush()
    if arguments.report is not None:
        from equilibra.report.deployment import write_deployment

        write_deployment(said, Path(arguments.report), overwrite=arguments.overwrite)
        print(f"wrote {arguments.report}: open it in a browser", file=sys.stderr)
    return 0


def _context(arguments: argparse.Namespace) -> Context:
    from equilibra.cost.decode import Context, context_of_file, context_of_lengths, lognormal_context

    given = [name for name in ("context", "answer_median", "lengths") if getattr(arguments, name) is not None]
    if len(given) != 1:
        raise InputError("give sequence lengths with exactly one of --context, --answer-median and --lengths")
    unused = [name for name in NOT_WITH[given[0]] if getattr(arguments, name) is not None]
    if unused:
        said = " and ".join(f"--{name.replace('_', '-')}" for name in (unused[0], given[0]))
        raise InputError(f"{said} do not go together: remove one")
    prompt, sigma = arguments.prompt, arguments.answer_sigma
    if arguments.context is not None:
        return Context(mean=arguments.context)
    if arguments.answer_median is not None:
        return lognormal_context(
            prompt=prompt or 0.0, median=arguments.answer_median, sigma=0.8 if sigma is None else sigma,
            limit=arguments.answer_limit,
        )  # fmt: skip
    if arguments.lengths.endswith(".json"):
        return context_of_file(Path(arguments.lengths), prompt)
    from equilibra.trace.open import load_trace

    offsets = load_trace(arguments.lengths).offsets
    return context_of_lengths(offsets[1:] - offsets[:-1], prompt or 0.0)


NOT_WITH = {
    "context": ("prompt", "answer_sigma", "answer_limit"), "answer_median": (),
    "lengths": ("answer_sigma", "answer_limit"),
}  # fmt: skip
"""length options that have no meaning beside the key"""


def _print(said: dict[str, Any], ours: Plan, others: tuple[Plan, ...]) -> None:
    context = said["context"]
    print(
        f"Decoding {said['model']} ({said['layers']} MoE layers): at most {said['latency_limit_ms']:g} ms between "
        f"tokens, at most {said['max_ranks']} GPUs;\na sequence has {context['mean']:,.0f} tokens in the cache on "
        f"average, the longest {context['longest']:,.0f}. Simulated.\n"
    )
    print(
        f"{'deployment':15}{'attention':>16}{'experts':>16}{'GPUs':>6}{'m':>3}{'batch':>7}{'T_a':>7}{'T_e':>7}{'T_c':>7}"
        f"{'latency':>10}{'tokens/s':>11}{'per GPU':>9}{'per cost':>10}"
    )
    for plan in (ours, *others):
        sides = (
            f"{plan.attention_nodes} x {plan.attention_tensor} {plan.hardware[0]}",
            f"{plan.expert_nodes} x {plan.expert_tensor} {plan.hardware[1]}",
        )
        cost = f"{plan.tokens_per_cost:>10,.0f}" if plan.cost_per_hour else f"{'-':>10}"
        print(
            f"{plan.kind:15}{sides[0]:>16}{sides[1]:>16}{plan.ranks:>6}{plan.micro_batches:>3}{plan.batch:>7}"
            f"{plan.t_a_us:>7.0f}{plan.t_e_us:>7.0f}{plan.t_c_us:>7.0f}{plan.latency_us * 1e-3:>7.1f} ms"
            f"{plan.tokens_per_s:>11,.0f}{plan.tokens_per_s_and_rank:>9,.0f}{cost}"
        )
    held = said["conditions"]
    missing = [text for name, text in CONDITIONS.items() if not held[name]]
    print(f"\n{said['sentence']}")
    print(f"Pace: {said['bound']['pace']}. The batch is limited by {said['bound']['batch']}.", end=" ")
    print("Full overlap." if not missing else f"No full overlap: {', '.join(missing)}.")
    if "answers_per_s" in said:
        print(f"{said['answers_per_s']:.3g} answers a second; the longest takes {said['longest_answer_s']:,.0f} s.")
    for reason in said["not_colocated"]:
        print(f"Not colocated on {reason}.")
    print(
        "\nnodes x tensor-parallel GPUs; colocated: attention and experts share GPUs. m: micro-batches in flight. "
        "batch: sequences\nper micro-batch and attention node. T_a, T_e, T_c: attention, experts and one transfer of a "
        "layer, in µs. per cost: tokens\nper unit of cost."
    )


CONDITIONS = {
    "balanced": "T_a and T_e differ by more than a tenth",
    "transfer_hidden": "T_c >= T_f",
    "enough_micro_batches": "m T_f < 2 (T_f + T_c)",
}


# --- run ---


def _add_run(kinds: Any) -> None:  # noqa: ANN401
    parser = kinds.add_parser(
        "run",
        help="answer prompts with the disaggregated engine",
        description="Starts attention and expert processes on this machine, loads a model and answers prompts. The "
        "same seed gives the same answers up to rounding, with any number of processes.",
    )
    parser.add_argument("--model", default="embedded", metavar="DIR", help="folder with a Hugging Face config.json, "
                        "weights optional (embedded: the small model of `equilibra train`)")  # fmt: skip
    engine = parser.add_argument_group("engine")
    number(engine, "--attention", 1, "N", "attention processes")
    number(engine, "--experts", 1, "N", "expert processes")
    number(engine, "--micro-batches", 2, "N", "micro-batches in flight per attention process")
    number(engine, "--places", 64, "N", "answers that an attention process decodes at a time")
    number(engine, "--kv-tokens", 16_384, "N", "tokens in the KV cache of an attention process")
    number(engine, "--page", 16, "N", "tokens per page of the KV cache")
    number(engine, "--prefill-tokens", 512, "N", "most prompt tokens per pass")
    number(engine, "--threads", 1, "N", "threads per process")
    number(engine, "--spare-slots", 1, "N", "copies of hot experts per layer and expert process", kind=int)
    for name, choices, default, text in (
        ("transport", ("shared", "gloo"), "shared", "how rows travel between processes"),
        ("dtype", ("float64", "float32", "bfloat16"), "float32", "number type of weights and activations"),
        ("device", ("cpu", "cuda"), "cpu", "where processes compute"),
    ):
        engine.add_argument(f"--{name}", choices=choices, default=default, help=f"{text} ({default})")
    asked = parser.add_argument_group("prompts and answers")
    asked.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated (default: random tokens)")
    number(asked, "--prompts", 16, "N", "without --prompt: random prompts")
    number(asked, "--prompt-tokens", 32, "N", "without --prompt: tokens per prompt")
    number(asked, "--answers", 1, "N", "answers per prompt")
    number(asked, "--tokens", 32, "N", "most tokens per answer")
    number(asked, "--temperature", 1.0, "X", "of sampling; 0: greedy", kind=float)
    number(asked, "--rounds", 2, "N", "how often to answer all prompts; experts are rebalanced between rounds")
    number(asked, "--seed", 0, "N", "random seed", kind=int)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_run)


def run_run(arguments: argparse.Namespace) -> int:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise InputError(f"equilibra rollout run needs {', '.join(missing)}: pip install 'equilibra[train]'")
    import numpy as np
    import torch

    from equilibra.integrations.hf import open_model_folder
    from equilibra.integrations.hf.disaggregated import embedded_folder, pool_model, weights_of_folder
    from equilibra.rollout import Pool, PoolSetting

    check_whole("seed", arguments.seed, low=0)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no GPU: use cpu")
    setting = PoolSetting(**named_like(PoolSetting, arguments))
    folder = embedded_folder() if arguments.model == "embedded" else open_model_folder(arguments.model)
    text, prompts = _prompts(arguments, folder)
    dtype = getattr(torch, arguments.dtype)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    model = pool_model(folder, dtype=dtype, device=device, end=-1 if text is None else text.end)
    with Pool(setting, model) as pool:
        pool.load_weights(weights_of_folder(folder, dtype, seed=arguments.seed), version=0)
        said = _rounds(pool, prompts, arguments)
    if arguments.json:
        print(json.dumps(said))
        return 0
    for answer in said["answers"]:
        print(answer["tokens"] if text is None else text.read(np.array(answer["tokens"])))
    for one in said["rounds"]:
        print(
            f"{one['tokens']} tokens in {one['seconds']:.2f} s: {one['tokens_per_s']:,.0f} tokens/s; expert processes "
            f"{one['imbalance']:.2f} of mean, {one['imbalance_without_copies']:.2f} without copies",
            file=sys.stderr,
        )
    return 0


def _prompts(arguments: argparse.Namespace, folder: ModelFolder) -> tuple[Text | None, list[NDArray[np.int64]]]:
    """The tokenizer and its prompts' tokens; nothing without --prompt."""
    if not arguments.prompt:
        return None, []
    from equilibra.integrations.hf import text_of

    if not folder.has_tokenizer:
        raise InputError(f"cannot read --prompt: {folder.path} has no tokenizer; without --prompt, prompts are random")
    text = text_of(folder, [])
    return text, [text.prompt(one) for one in arguments.prompt]


def _rounds(pool: Any, prompts: list[NDArray[np.int64]], arguments: argparse.Namespace) -> dict[str, Any]:  # noqa: ANN401
    from time import perf_counter

    import numpy as np

    from equilibra.rl.engine import Request

    random = np.random.default_rng([arguments.seed, 1])
    rounds, size = [], (arguments.prompts, arguments.prompt_tokens)
    for index in range(arguments.rounds):
        asked = prompts or list(random.integers(0, pool.model.vocabulary, size))
        requests = [
            Request(tokens=prompt, noise=random.random(arguments.tokens))
            for prompt in asked
            for _ in range(arguments.answers)
        ]
        if index:
            pool.rebalance()
        start = perf_counter()
        answers = pool.generate(requests, temperature=arguments.temperature)
        seconds, statistics = perf_counter() - start, pool.statistics()
        tokens = sum(answer.tokens.size for answer in answers)
        rounds.append({
            "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
            "imbalance": statistics.imbalance, "imbalance_without_copies": statistics.imbalance_without_copies,
            "passes": statistics.passes, "preempted": statistics.preempted,
        })  # fmt: skip
    return {"answers": [{"tokens": one.tokens.tolist(), "ended": one.ended} for one in answers], "rounds": rounds}
