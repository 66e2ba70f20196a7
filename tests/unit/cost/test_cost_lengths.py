"""What a batch that is kept full sees of answers of random length."""

import json

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.cost.decode import Context, context_of_file, context_of_lengths, lognormal_context


def by_moments(answers, prompts):
    """Every token of every answer is one moment at which a batch can be looked at."""
    seen = np.concatenate([p + np.arange(a) + 0.5 for a, p in zip(answers, prompts, strict=True)])
    return seen.mean(), seen.std()


def test_the_context_is_that_of_every_moment():
    rng = np.random.default_rng(0)
    answers, prompts = rng.integers(1, 500, 40), rng.integers(0, 300, 40)
    context = context_of_lengths(answers, prompts)
    mean, deviation = by_moments(answers, prompts)
    assert context.mean == pytest.approx(mean, rel=1e-9)
    assert context.deviation == pytest.approx(deviation, rel=1e-3)
    assert context.longest == (answers + prompts).max()
    assert context.mean_answer == pytest.approx(answers.mean())
    assert context.longest_answer == answers.max()


def test_a_long_tail_is_seen_more_often_than_it_occurs():
    short = context_of_lengths([1000.0] * 100)
    tail = context_of_lengths([1000.0] * 99 + [50_000.0])
    assert short.mean == 500
    assert tail.mean > 15 * short.mean  # one answer in a hundred
    assert tail.mean_answer == pytest.approx(1490)


def test_lognormal_answers():
    context = lognormal_context(prompt=200, median=1000, sigma=0.5)
    of_answer = 1000 * np.exp(0.5**2 / 2)
    assert context.mean_answer == pytest.approx(of_answer, rel=0.01)
    assert context.mean == pytest.approx(200 + 1000 * np.exp(1.5 * 0.25) / 2, rel=0.01)  # E[a²] / 2 E[a]
    cut = lognormal_context(prompt=200, median=1000, sigma=0.5, limit=1500)
    assert cut.longest_answer == 1500
    assert cut.mean < context.mean


def test_files(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[10, 20]")
    assert context_of_file(path) == context_of_lengths([10, 20])
    path.write_text(json.dumps({"answers": [10, 20], "prompts": [1, 2]}))
    assert context_of_file(path) == context_of_lengths([10, 20], [1, 2])
    path.write_text(json.dumps({"percentiles": {"0": 100, "100": 300}, "prompts": 50}))
    even = context_of_file(path)
    assert even.mean_answer == pytest.approx(200, rel=1e-3)
    assert even.longest == pytest.approx(350, rel=1e-3)
    with pytest.raises(InputError, match="has prompts: give no other"):
        context_of_file(path, 50.0)
    path.write_text("[10, 20]")
    assert context_of_file(path, 7.0) == context_of_lengths([10, 20], 7.0)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not valid JSON"), ("3", "give a list"), ("{}", "give a list"), ('{"answers": [], "prompts": 0}', "lengths"),
    ('{"answers": [0]}', "lengths must be"),
    ('{"answers": ["a"]}', "must be numbers"), ("[1, null]", "lengths must be"),
    ('{"percentiles": [1]}', "must be numbers"), ('{"answers": [[1]]}', "lengths must be"),
    ('{"answers": [1, 2], "prompts": [1, 2, 3]}', "must be numbers"),
    ('{"answers": [5], "promts": [1]}', "give a list"),
    ('{"percentiles": {}}', "do not fall from 0 to 100"), ('{"percentiles": {"150": 9}}', "do not fall from 0 to 100"),
    ('{"percentiles": {"nan": 9}}', "do not fall"), ('{"percentiles": {"50": 9, "99": 1}}', "do not fall"),
])  # fmt: skip
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        context_of_file(path)


def test_missing_files_and_bad_numbers(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        context_of_file(tmp_path / "none.json")
    with pytest.raises(InputError, match="answer limit must be"):
        lognormal_context(prompt=0, median=9, sigma=1, limit=0)
    for changes in ({"mean": 0}, {"mean": float("nan")}, {"mean": 5, "deviation": -1.0}):
        with pytest.raises(InputError, match="context"):
            Context(**changes)
