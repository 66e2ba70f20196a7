"""`equilibra rollout run`: answers on stdout, figures on stderr, errors that say what to do."""

import json

import pytest

from equilibra.cli.main import main

SOME = ["--prompts", "16", "--prompt-tokens", "16", "--tokens", "8", "--rounds", "2"]


def test_answers_and_figures_of_every_round(capsys):
    assert main(["rollout", "run", "--json", *SOME, "--experts", "2", "--micro-batches", "3"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [len(answer["tokens"]) for answer in said["answers"]] == [8] * 16
    first, second = said["rounds"]
    assert first["imbalance"] == first["imbalance_without_copies"]
    assert second["imbalance"] < second["imbalance_without_copies"]


@pytest.mark.parametrize(("words", "reason"), [
    (["--experts", "300"], "cannot spread 16 experts over 300 expert processes: use at most 16"),
    (["--spare-slots", "-1"], "spare_slots must be"),
    (["--seed", "-1"], "seed must be a whole number from 0"),
    (["--prefill-tokens", "100000000"], "lower prefill_tokens or places"),
    (["--kv-tokens", "3"], "kv_tokens = 3 is less than a page of 16 tokens"),
    (["--prompt", "hello"], "has no tokenizer; without --prompt, prompts are random"),
    (["--model", "nowhere"], "cannot use nowhere as a model folder"),
])  # fmt: skip
def test_what_cannot_work_is_refused(words, reason, capsys):
    assert main(["rollout", "run", *words]) == 2
    assert reason in capsys.readouterr().err
