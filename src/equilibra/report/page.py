"""`write_report`: a run as one self-contained HTML file that needs no other file and no network.

The file contains the template, the style, the scripts and the data of the run. The data is JSON in a script element
that browsers do not execute, and the scripts insert it only as text, so no name in a run can become HTML. A
Content-Security-Policy allows only the inlined scripts, by their hashes, and no connections.
"""

from __future__ import annotations

import base64
import json
import math
import re
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from equilibra.core.atomic import atomic_file
from equilibra.core.errors import InputError
from equilibra.events.run import PASSES, Run
from equilibra.report.answer import answer, training
from equilibra.report.figures import chosen_pair, collect_detail, labels_of, planner_figures, predictions_in
from equilibra.report.timeline import timeline

PAGE_BYTES = 4_900_000
"""page size beyond which only the two compared planners get a drill-down"""
SCRIPTS = (
    "echarts.min.js", "format.js", "data.js", "theme.js", "elements.js", "answer.js", "heat.js", "layers.js",
    "drill.js", "gantt.js", "memory.js", "report.js",
)  # fmt: skip
"""scripts in the order in which they are inlined"""
TRAINING_SCRIPT = "training.js"
"""added for training runs"""
MIXED = "measured; predicted where the name says so"
ESCAPES = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def write_report(run: Run, path: Path, *, overwrite: bool = False) -> None:
    """Write the page; it appears at `path` when it is complete."""
    with atomic_file(Path(path), overwrite=overwrite) as part:
        part.write_text(render(run), encoding="utf-8")


def render(run: Run) -> str:
    """The page as text; the same run always gives the same page."""
    num_layers, num_ranks, num_experts = _shape(run)
    curves, labels, pair, predictions = training(run), labels_of(run), chosen_pair(run.planners), predictions_in(run)
    apart = [] if pair[0] not in predictions else [name for name in run.planners if name not in predictions]
    scripts = [asset(name) for name in (*SCRIPTS, *([TRAINING_SCRIPT] if curves else []))]
    style, template = asset("report.css") + (asset("training.css") if curves else ""), asset("report.html")
    small = {
        "about": _about(run),
        "answer": answer(run),
        "pair": list(pair),
        "num_layers": num_layers,
        "num_ranks": num_ranks,
        "num_experts": num_experts,
        "passes": list(PASSES),
        "planners": [
            planner_figures(name, record, label=labels[name], among_predictions=name in apart)
            for name, record in run.planners.items()
        ],
        "timeline": timeline(run, num_ranks),
        **({"training": curves} if curves else {}),
    }  # fmt: skip
    fixed = sum(len(text.encode()) for text in (*scripts, style, template, _json(small)))
    arrays, detail = collect_detail(run, budget_bytes=PAGE_BYTES - fixed)
    data = _json({**small, "arrays": arrays, "detail": detail})
    parts = {
        "{policy}": f"default-src 'none'; script-src {' '.join(map(hash_of, scripts))}; style-src {hash_of(style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'",
        "<!--style-->": f"<style>{style}</style>",
        "<!--training-link-->": '<a href="#training">Training</a>' if curves else "",
        "<!--training-->": asset("training.html") if curves else "",
        "<!--data-->": f'<script type="application/json" id="run">{data}</script>',
        "<!--scripts-->": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # one pass: inserted parts are not searched for marks
    return re.sub("|".join(map(re.escape, parts)), lambda mark: parts[mark[0]], template)


def _about(run: Run) -> dict[str, Any]:
    """`run.about` without what the page shows elsewhere."""
    about = {key: value for key, value in run.about.items() if key not in ("training", "predicted")}
    return {**about, "kind": MIXED} if predictions_in(run) else about


def _shape(run: Run) -> tuple[int, int, int]:
    """(L, R, E), the same for all planners."""
    shapes = {
        (*record.rank_tokens_LMR.shape[::2], record.home_of_expert_LE.shape[1]): name
        for name, record in run.planners.items()
    }
    if len(shapes) != 1:
        found = ", ".join(f"{name} {shape}" for shape, name in shapes.items()) or "no planner"
        raise InputError(f"a report needs planners of one model and cluster, not (layers, ranks, experts) of {found}")
    return next(iter(shapes))


def hash_of(text: str) -> str:
    """A Content-Security-Policy source that allows exactly this inlined script or style."""
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def asset(name: str) -> str:
    """The text of a file in `assets`."""
    text = (files("equilibra.report") / "assets" / name).read_text(encoding="utf-8")
    if name.endswith(".js") and "</script" in text.lower():
        raise InputError(f"{name} contains </script, which would end its script element; write it as <\\/script")
    return text


def _json(value: object) -> str:
    """JSON that is safe inside a script element; numbers that are not finite become null."""
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return text.translate(ESCAPES)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
