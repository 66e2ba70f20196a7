"""`write_deployment`: an answer of `equilibra rollout plan` as one self-contained page, without scripts.

Four lanes show the first layers of an iteration: attention, the link to the experts, experts, the link back. Colours
are micro-batches, grey is idle: a bubble. Below them: the times that set the pace, the conditions of full overlap and
the memory of both sides. Names from files are escaped, and a Content-Security-Policy allows only the page's own style.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from equilibra.core.atomic import atomic_file
from equilibra.report.page import asset, hash_of

WIDTH, LEFT, RIGHT, LANE = 1000, 110, 16, 34
COLOURS = 4
LANES = ("attention", "to experts", "experts", "to attention")
LEAST_LABEL = 22
"""pixels of a box that has room for its label"""
WIDE = '<div class="wide" tabindex="0">'
"""scrolls sideways on a narrow screen, also by keyboard"""
CONDITIONS = {
    "balanced": "T_a and T_e within a tenth of each other",
    "transfer_hidden": "T_c < T_f",
    "enough_micro_batches": "m T_f ≥ 2 (T_f + T_c)",
}


def write_deployment(said: dict[str, Any], path: Path, *, overwrite: bool = False) -> None:
    """Write the page; it appears at `path` when it is complete."""
    with atomic_file(Path(path), overwrite=overwrite) as part:
        part.write_text(render_deployment(said), encoding="utf-8")


def render_deployment(said: dict[str, Any]) -> str:
    """The page of an answer's JSON."""
    style = asset("deployment.css")
    sections = (_head(said), _deployments(said), _timeline(said), _pace(said), _memory(said), _origin(said))
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src {hash_of(style)}; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Equilibra deployment</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _head(said: dict[str, Any]) -> str:
    plan, context = said["disaggregated"], said["context"]
    hardware = said["hardware"]
    facts = [
        (f"{plan['tokens_per_s_and_rank']:,.0f}", f"tokens a second and GPU, {plan['tokens_per_s']:,.0f} in all"),
        (f"{plan['latency_us'] * 1e-3:.1f} ms", f"between two tokens; {said['latency_limit_ms']:g} ms allowed"),
        (f"{plan['sequences']:,}", f"sequences at once, in {plan['micro_batches']} micro-batches"),
        (f"{plan['ranks']}", f"GPUs: {_side(plan, 'attention')} for attention, {_side(plan, 'expert')} for experts"),
    ]
    if "answers_per_s" in said:
        longest = f"answers a second; the longest takes {said['longest_answer_s']:,.0f} s"
        facts.append((f"{said['answers_per_s']:.3g}", longest))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for value, label in facts)
    return f"""<p class="eyebrow">{escape(said["model"])}: attention on {escape(hardware["attention"])}, experts on
{escape(hardware["experts"])}; {context["mean"]:,.0f} tokens in the cache of a sequence on average, at most
{context["longest"]:,.0f}. Simulated.</p>
<h1>{escape(said["sentence"])}</h1>
<ul class="facts">{items}</ul>"""


def _side(plan: dict[str, Any], name: str) -> str:
    return f"{plan[f'{name}_nodes']} × {plan[f'{name}_tensor']}"


def _deployments(said: dict[str, Any]) -> str:
    rows: list[Sequence[object]] = []
    for plan in (said["disaggregated"], *said["colocated"]):
        cost = f"{plan['tokens_per_cost']:,.0f}" if plan["tokens_per_cost"] else "–"
        sides = [
            f"{_side(plan, name)} {of}" for name, of in zip(("attention", "expert"), plan["hardware"], strict=True)
        ]
        rows.append((
            plan["kind"], *sides, plan["ranks"], plan["micro_batches"], f"{plan['batch']:,}",
            f"{plan['latency_us'] * 1e-3:.1f} ms", f"{plan['tokens_per_s']:,.0f}",
            f"{plan['tokens_per_s_and_rank']:,.0f}", cost,
        ))  # fmt: skip
    heads = ("deployment", "attention", "experts", "GPUs", "micro-batches", "batch", "latency", "tokens/s", "per GPU",
             "per cost")  # fmt: skip
    reasons = "".join(f'<p class="note">Not colocated on {escape(reason)}.</p>' for reason in said["not_colocated"])
    return f"""<h2>Deployments</h2>
<p>Each is the best of its kind under the same laws. Nodes × tensor-parallel GPUs; colocated GPUs do both.</p>
{_table(heads, rows)}{reasons}"""


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"{WIDE}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _timeline(said: dict[str, Any]) -> str:
    pipeline = said["pipeline"]
    busy, idle = pipeline["busy"], pipeline["idle"]
    end = max(one[4] for one in busy)
    scale = (WIDTH - LEFT - RIGHT) / end
    bottom = 8 + len(LANES) * (LANE + 8)
    parts = _axis(end, scale, bottom)
    for lane, name in enumerate(LANES):
        top = 8 + lane * (LANE + 8)
        parts.append(f'<text x="0" y="{top + 21}">{name}</text>')
        parts.append(f'<rect class="idle" x="{LEFT}" y="{top}" width="{end * scale:.1f}" height="{LANE}"/>')
        for server, layer, micro_batch, start, stop in busy:
            if server == name:
                parts.append(_box(LEFT + start * scale, top, (stop - start) * scale, layer, micro_batch))
    return f"""<h2>The pipeline</h2>
<p>The first {pipeline["layers_shown"]} of {said["layers"]} layers. Boxes are layer.micro-batch; grey is idle. Over the
whole iteration attention idles {idle["attention"]:.0%} of the time, experts {idle["experts"]:.0%}.</p>
{WIDE}<svg viewBox="0 0 {WIDTH} {bottom + 26}" role="img" aria-label="Timeline of attention, links and
experts">{"".join(parts)}</svg></div>"""


def _box(x: float, y: float, width: float, layer: int, micro_batch: int) -> str:
    size = f'x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{LANE}"'
    box = f'<rect class="m{micro_batch % COLOURS}" {size}/>'
    if width < LEAST_LABEL:
        return box
    return f'{box}<text class="on" x="{x + width / 2:.1f}" y="{y + 21}">{layer + 1}.{micro_batch + 1}</text>'


def _axis(end: float, scale: float, bottom: float) -> list[str]:
    size = next((s * 10**p for p in range(-3, 9) for s in (1, 2, 5) if end / (s * 10**p) <= 8), end)
    marks = []
    for number in range(int(end / size) + 1):
        x = LEFT + number * size * scale
        marks.append(f'<line class="tick" x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{bottom}"/>')
        marks.append(f'<text x="{x:.1f}" y="{bottom + 16}">{number * size:,g} µs</text>')
    return marks


def _pace(said: dict[str, Any]) -> str:
    plan, held = said["disaggregated"], said["conditions"]
    times = {"T_a, attention": plan["t_a_us"], "T_e, experts": plan["t_e_us"], "T_c, a transfer": plan["t_c_us"]}
    bars = _bars([(name, us, f"{us:,.0f} µs") for name, us in times.items()], max(times.values()))
    layers, m, slower = said["layers"], plan["micro_batches"], max(plan["t_a_us"], plan["t_e_us"])
    overlapped = plan["t_a_us"] + plan["t_e_us"] + 2 * plan["t_c_us"] + slower * (m * layers - 1)
    exact = abs(said["pipeline"]["iteration_us"] / overlapped - 1) < 1e-6
    formula = (
        f"({plan['t_a_us']:.0f} + {plan['t_e_us']:.0f} + 2 × {plan['t_c_us']:.0f}) + "
        f"{slower:.0f} × ({m} × {layers} − 1)"
    )
    conditions = [(text, "holds" if held[name] else "does not hold") for name, text in CONDITIONS.items()]
    says = "which is" if exact else f"more than the {overlapped * 1e-3:.2f} ms of full overlap,"
    return f"""<h2>Where the bound is</h2>
<p>Pace: {escape(said["bound"]["pace"])}. The batch is limited by {escape(said["bound"]["batch"])}.</p>
{WIDE}{bars}</div>
<p class="note">An iteration takes {said["pipeline"]["iteration_us"] * 1e-3:.2f} ms, {says}
<code>(T_a + T_e + 2 T_c) + T_f (m L − 1) = {formula} µs</code>; dense layers and the output head add
{plan["outer_us"]:,.0f} µs a micro-batch.</p>
{_table(("condition of full overlap", ""), conditions)}"""


def _memory(said: dict[str, Any]) -> str:
    attention, experts = said["disaggregated"]["memory_bytes"]
    room = said["room_bytes"]
    rows = [
        (f"attention, {said['hardware']['attention']}", attention / room["attention"],
         f"{attention / 1e9:.0f} of {room['attention'] / 1e9:.0f} GB"),
        (f"experts, {said['hardware']['experts']}", experts / room["experts"],
         f"{experts / 1e9:.0f} of {room['experts'] / 1e9:.0f} GB"),
    ]  # fmt: skip
    return f"""<h2>Memory of a GPU</h2>
<p>Weights and caches; a tenth of device memory is left for activations and the runtime.</p>
{WIDE}{_bars(rows, 1.0)}</div>"""


def _bars(rows: Sequence[tuple[str, float, str]], most: float) -> str:
    parts, left, room = [], 190, WIDTH - 190 - 150
    for number, (name, value, text) in enumerate(rows):
        y = 6 + number * 34
        width = value / most * room
        parts.append(f'<text x="0" y="{y + 17}">{escape(name)}</text>')
        parts.append(f'<rect class="idle" x="{left}" y="{y}" width="{room}" height="24"/>')
        parts.append(f'<rect class="m0" x="{left}" y="{y}" width="{width:.1f}" height="24"/>')
        parts.append(f'<text x="{left + room + 10}" y="{y + 17}">{escape(text)}</text>')
    height = 10 + len(rows) * 34
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Bars">{"".join(parts)}</svg>'


def _origin(said: dict[str, Any]) -> str:
    context, cost = said["context"], said["cost_per_hour"]
    costs = f"{cost['attention']:g} and {cost['experts']:g} a GPU and hour" if all(cost.values()) else "unknown"
    return f"""<h2>Origin</h2>
<p class="note">Modelled, not measured. Decode law: {escape(said["law"])}. Context {context["mean"]:,.0f} ±
{context["deviation"]:,.0f} tokens. Fullest expert node over the mean: {said["imbalance"]:g}. Costs: {costs}. Best
tokens per {"GPU" if said["objective"] == "gpu" else "cost"} of at most {said["max_ranks"]} GPUs, searched in
{said["search_s"]:.2f} s. The colocated deployment overlaps two
micro-batches perfectly.</p>"""
