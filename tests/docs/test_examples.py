"""What the documentation shows is run."""

import json
import re
import subprocess
import sys

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


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


def test_the_readme_has_code():
    assert readme_blocks("python")
    assert any("make run" in block and "make test" in block for block in readme_blocks("bash"))


@pytest.mark.parametrize("number", range(len(readme_blocks("python"))))
def test_readme_python_runs(number, capsys):
    exec(compile(readme_blocks("python")[number], "README.md", "exec"), {"__name__": "readme"})


def readme_commands() -> list[str]:
    lines = "\n".join(readme_blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.startswith("equilibra ")]


SHORT = [
    "run.steps=2", "warm_up.steps=2", "run.evaluate_problems=4", "rollout.prompts=4", "rollout.answers=2",
    "cluster.nodes=1", "rollout.max_prompt_tokens=256", "run.dtype=float32",
]  # fmt: skip
"""what makes a training run one of seconds"""


def short_training(words: list[str], number: int) -> list[str]:
    """A command of the README, about things that are there and with little to do."""
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
    return [command for command in readme_commands() if command.split()[1] == "train"]


def test_readme_commands_run_in_order(tmp_path):
    commands = [command for command in readme_commands() if command.split()[1] != "train"]
    assert len(commands) >= 3
    run_commands(commands, tmp_path)


def test_readme_trains_on_a_file_and_resumes(tmp_path):
    first, *_, last = training_commands()
    assert "jsonl" in first
    assert "--resume" in last
    run_commands([first, last], tmp_path)


@pytest.mark.slow
def test_readme_training_commands_run_in_order(tmp_path):
    assert len(training_commands()) >= 4
    run_commands(training_commands(), tmp_path)


def test_make_targets_exist():
    makefile = (REPOSITORY / "Makefile").read_text()
    text = (REPOSITORY / "README.md").read_text() + (REPOSITORY / "CONTRIBUTING.md").read_text()
    for target in set(re.findall(r"`?make ([a-z][a-z-]+)", text)):
        assert f"\n{target}:" in makefile, target
