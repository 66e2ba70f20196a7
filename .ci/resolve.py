"""Checks that the public index can give what constraints.txt pins: `resolve.py 3.11 3.12 ...`, a Python version each.

uv resolves from metadata alone, for Pythons that are not on this machine too, and does not read pip's settings: wheels
that only this machine has do not count. A pin that cannot be met, or an index that cannot be reached, is an error. At
the end one pin is spoiled, so that a resolver that agrees to everything is noticed.
"""

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPOILED = ("triton==3.7.1", "triton==3.9.0", "depends on triton")
"""a pin, a version that torch does not take, and what the resolver says of it"""


def resolved(version: str, constraints: Path, *what: str) -> str:
    """What the resolver says against it; empty where it found every version."""
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run(
        [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--python-version", version,
         "--python-platform", "x86_64-manylinux_2_28", "--constraint", constraints, *what],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr.strip() or f"uv ended with {done.returncode}"


def main(versions: list[str]) -> int:
    """Resolve for every version, and once with a spoiled pin; the exit status."""
    pins = ROOT / "constraints.txt"
    asked = [
        (version, *what)
        for version in versions
        for what in (("pyproject.toml", "--extra", "dev", "--extra", "docs"), ("frameworks.txt", "--no-deps", "--only-binary", ":all:"))
    ]
    with ThreadPoolExecutor(len(asked)) as pool, tempfile.NamedTemporaryFile("w", suffix=".txt") as spoiled:
        pin, other, complaint = SPOILED
        assert pin in pins.read_text().split(), f"constraints.txt has no {pin}: name the new pin in {__file__}"
        spoiled.write(pins.read_text().replace(pin, other))
        spoiled.flush()
        answers = list(pool.map(lambda one: resolved(one[0], pins, *one[1:]), asked))
        noticed = "" if any(answers) else resolved(versions[0], Path(spoiled.name), "pyproject.toml", "--extra", "dev")
    for (version, what, *_), answer in zip(asked, answers, strict=True):
        print(f"Python {version}, {what}: {answer or 'resolved'}")
    if any(answers):
        return 1
    if complaint not in noticed:
        print(f"{other} should have been refused, but the resolver said: {noticed or 'resolved'}")
        return 1
    print(f"{other} is refused, as it must be")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
