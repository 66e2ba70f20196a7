"""What the documentation shows is run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import REPOSITORY
from tests.references.hf_models import small_config

from equilibra.events.run import load_run
from equilibra.report.page import render

TRAINING = REPOSITORY / "examples" / "balanced_training.py"
EXAMPLES = sorted(set((REPOSITORY / "examples").glob("*.py")) - {TRAINING})


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_run(file):
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_balancing_changes_no_number_of_the_example(tmp_path):
    done = subprocess.run(
        [sys.executable, str(TRAINING), str(tmp_path / "step.run")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = re.findall(r"(\w+) +step (\d): loss ([\d.]+), slowest rank over mean ([\d.]+)", done.stdout)
    losses = {(planner, step): float(loss) for planner, step, loss, _ in found}
    ratios = {(planner, step): float(ratio) for planner, step, _, ratio in found}
    assert len(found) == 6
    for step in "012":
        assert losses["static", step] == pytest.approx(losses["equilibra", step], rel=1e-4)
        assert ratios["equilibra", step] < 1.05 < ratios["static", step]
    run = load_run(tmp_path / "step.run")
    measured, predicted = run.planners["equilibra"], run.planners["predicted"]
    assert (measured.rank_tokens_LMR == predicted.rank_tokens_LMR).all()
    assert "took" in render(run)


README, TUTORIAL, COMMANDS, GLOSSARY = (
    REPOSITORY / name for name in ("README.md", "docs/tutorial.md", "docs/reference/commands.md", "docs/glossary.md")
)
MOST_WORDS, MOST_LINES = 900, 8
"""what the README may have: words in all, and lines of Python"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


PYTHON = [(page, block) for page in (README, TUTORIAL, GLOSSARY) for block in blocks(page, "python")]


def test_the_readme_is_short_and_has_code():
    assert len(README.read_text().split()) <= MOST_WORDS
    assert [len(block.splitlines()) for block in blocks(README, "python")] == [MOST_LINES]
    assert any("make run" in block and "make test" in block for block in blocks(README, "bash"))


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[f"{page.stem}-{n}" for n, (page, _) in enumerate(PYTHON)])
def test_documented_python_runs(page, block, capsys):
    exec(compile(block, page.name, "exec"), {"__name__": "documentation"})


def documented_commands() -> list[str]:
    """Commands of the reference, then those that only the tutorial has."""
    lines = "\n".join(blocks(COMMANDS, "bash") + blocks(TUTORIAL, "bash")).replace("\\\n", " ").splitlines()
    said = [line.split("#")[0].split() for line in lines if line.startswith("equilibra ")]
    return [*dict.fromkeys(" ".join(words) for words in said)]


SHORT = [
    "run.steps=2", "warm_up.steps=2", "run.evaluate_problems=4", "rollout.prompts=4", "rollout.answers=2",
    "cluster.nodes=1", "rollout.max_prompt_tokens=256", "run.dtype=float32",
]  # fmt: skip
"""what makes a training run one of seconds"""


def short_training(words: list[str], number: int) -> list[str]:
    """A documented command, about things that are there and with little to do."""
    if "--resume" in words:
        return [*words[:-1], "run0", "--steps", "3"]
    named = [word.replace("FOLDER", "folder").replace("run.dtype=bfloat16", "run.dtype=float32") for word in words]
    said = {word.partition("=")[0] for word in named}
    return [*named, "--output", f"run{number}", *(word for word in SHORT if word.partition("=")[0] not in said)]


def run_commands(commands: list[str], folder) -> None:
    """One after another, in a folder that has what they are about."""
    small_config("olmoe").save_pretrained(folder / "folder")
    lines = [json.dumps({"question": f"{n} + 1 = ", "answer": str(n + 1)}) for n in range(40)]
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n")
    for number, command in enumerate(commands):
        words = command.split()
        if words[1] == "bench":
            words.append("--quick")
        if words[1] == "train":
            words = short_training(words, number)
        done = subprocess.run(
            [sys.executable, "-m", "equilibra", *words[1:]], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def training_commands() -> list[str]:
    return [command for command in documented_commands() if command.split()[1] == "train"]


def test_documented_commands_run_in_order(tmp_path):
    commands = [command for command in documented_commands() if command.split()[1] != "train"]
    assert len(commands) >= 3
    run_commands(commands, tmp_path)


@pytest.mark.slow
def test_documented_training_runs_on_a_file_and_resumes(tmp_path):
    first, *_, last = training_commands()
    assert "jsonl" in first
    assert "--resume" in last
    run_commands([first, last], tmp_path)


@pytest.mark.slow
def test_documented_training_commands_run_in_order(tmp_path):
    assert len(training_commands()) >= 4
    run_commands(training_commands(), tmp_path)


def test_make_targets_exist():
    makefile = (REPOSITORY / "Makefile").read_text()
    text = "".join(page.read_text() for page in (README, TUTORIAL, COMMANDS, REPOSITORY / "CONTRIBUTING.md"))
    for target in set(re.findall(r"(?:`|^)make ([a-z][a-z-]+)", text, re.MULTILINE)):
        assert f"\n{target}:" in makefile, target
