"""What the documentation shows is run."""

import re
import subprocess
import sys

import pytest
from tests.conftest import REPOSITORY

from equilibra.measure.run import load_run
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


def test_readme_commands_run_in_order(tmp_path):
    commands = readme_commands()
    assert len(commands) >= 3
    for command in commands:
        words = command.split()
        if words[1] == "bench":
            words.append("--quick")
        done = subprocess.run(
            [sys.executable, "-m", "equilibra.cli.main", *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_make_targets_exist():
    makefile = (REPOSITORY / "Makefile").read_text()
    text = (REPOSITORY / "README.md").read_text() + (REPOSITORY / "CONTRIBUTING.md").read_text()
    for target in set(re.findall(r"`?make ([a-z][a-z-]+)", text)):
        assert f"\n{target}:" in makefile, target
