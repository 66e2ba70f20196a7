"""Hooks of mkdocs.yml: what lies outside docs/ joins the site, and links to it are checked and followed.

Pages in docs/ link to the repository as it is (`../benchmarks/results/planner.md`, `../examples/plan_a_step.py`), so they
read the same in a checkout. On the site, results, examples, the changelog and CONTRIBUTING are pages of their own; links
to other files of the repository become plain text. A link that leads nowhere is a warning, which strict mode refuses.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s#]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```\s*?$)", re.DOTALL | re.MULTILINE)
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"
log = logging.getLogger("mkdocs.hooks.site")


def _outside() -> dict[str, str]:
    """Address on the site of every file outside docs/ that is shown there, by its path in the repository."""
    results = [*ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("benchmarks/results/*.png")]
    data = [file for file in ROOT.glob("benchmarks/results/*.json") if file.stat().st_size < 2_000_000]
    shown = {f"benchmarks/results/{file.name}": f"results/{file.name}" for file in [*results, *data]}
    shown |= {f"examples/{file.name}": f"examples/{file.stem}.md" for file in ROOT.glob("examples/*.py")}
    return shown | {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


SITE_OF = _outside()
REPOSITORY_OF = {site: path for path, site in SITE_OF.items()}


def _content(path: str) -> str | bytes:
    """What the site shows of a file outside docs/."""
    file = ROOT / path
    if file.suffix in {".png", ".json"}:
        return file.read_bytes()
    text = file.read_text()
    if file.suffix == ".py":
        return f"# {file.stem.replace('_', ' ').capitalize()}\n\n`python {path}`\n\n```python\n{text}```\n"
    return NOT_SEARCHED + text if path.startswith("benchmarks/") else text


def on_files(files, config):
    """Add what lies outside docs/."""
    for path, site in SITE_OF.items():
        files.append(File.generated(config, site, content=_content(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links at the site's pages; links to files that the site does not show become text."""
    here = REPOSITORY_OF.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replaced(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if not (ROOT / path).exists() and not (path.startswith("docs/") and files.get_file_from_path(path[5:])):
            log.warning("%s links to %s, which is not in the repository", here, target)
            return match[0]
        site = path[5:] if path.startswith("docs/") else SITE_OF.get(path)
        if site is None:
            return label.strip("![]")
        return f"{label}({posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)
