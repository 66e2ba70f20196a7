"""Problems from reasoning-gym: the split, any order and process, names and options, what scorers make of answers."""

import inspect
import os
import random
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.integrations import reasoning_gym as ours
from equilibra.integrations.reasoning_gym import dataset_names, reasoning_gym_task
from equilibra.rl.tasks import Problem, hash_of_prompt

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""one-digit sums: some 160 of them"""


def training(task, count=300):
    return [task.problem(number) for number in range(count)]


def test_problems_and_rewards():
    task = reasoning_gym_task("chain_sum", SMALL, seed=1)
    assert task.name == "reasoning-gym/chain_sum"
    for problem in [*training(task, 20), *map(task.held_out, range(10))]:
        assert str(eval(re.search(r"[0-9].*[0-9]", problem.prompt)[0])) == problem.answer
        assert task.reward(problem, problem.answer) == 1.0
        assert task.reward(problem, f" {problem.answer}\n") == 1.0
        assert task.reward(problem, f"hm <answer>3</answer> no <answer> {problem.answer} </answer>.") == 1.0
        assert task.reward(problem, "") == task.reward(problem, "<answer></answer>" + problem.answer) == 0.0
        assert 0 <= task.reward(problem, str(int(problem.answer) + 1)) < 0.6


def test_no_prompt_is_on_both_sides_even_where_there_are_few():
    task = reasoning_gym_task("chain_sum", SMALL, seed=1)
    trained = {problem.prompt for problem in training(task, 1000)}
    held_out = [task.held_out(number).prompt for number in range(20)]
    assert len(set(held_out)) == 20
    assert not trained & set(held_out)
    assert len(trained) > 100  # nearly all that there are
    assert [task.held_out(number).number for number in range(20)] == list(range(20))


def test_the_control_without_the_split_they_overlap(monkeypatch):
    sides = iter(range(10**9))
    monkeypatch.setattr(ours, "hash_of_prompt", lambda prompt: (next(sides) % 5) << 61)
    task = reasoning_gym_task("chain_sum", SMALL, seed=1)
    trained = {problem.prompt for problem in training(task, 1000)}
    assert trained & {task.held_out(number).prompt for number in range(20)}


def test_the_share_decides_the_side():
    for share in (0.2, 0.6):
        task = reasoning_gym_task("chain_sum", SMALL, held_out_share=share)
        assert min(hash_of_prompt(problem.prompt) for problem in training(task, 50)) >= share * 2**64
        assert max(hash_of_prompt(task.held_out(number).prompt) for number in range(10)) < share * 2**64


def test_any_order_and_any_number_give_the_same():
    one, other = (reasoning_gym_task("chain_sum", seed=5) for _ in range(2))
    numbers = [0, 499, 500, 501, 7, 10**12, 3, 1_000_000]
    asked = {number: one.problem(number) for number in numbers}
    one.held_out(3)
    assert {number: other.problem(number) for number in reversed(numbers)} == asked
    assert [asked[number].number for number in numbers] == numbers
    assert other.held_out(3) == one.held_out(3)
    assert len({problem.prompt for problem in asked.values()}) == len(numbers)
    assert reasoning_gym_task("chain_sum", seed=6).problem(0) != asked[0]
    assert one.problem(7) is one.problem(7)  # remembered: answers of a group all ask for it


def test_what_is_forgotten_comes_back_the_same(monkeypatch):
    task = reasoning_gym_task("chain_sum", seed=5)
    before = training(task, 30)
    monkeypatch.setattr(ours, "PROBLEMS_KEPT", 2)
    monkeypatch.setattr(ours, "CHUNKS_KEPT", 1)
    small = reasoning_gym_task("chain_sum", seed=5)
    assert [*map(small.problem, reversed(range(30)))][::-1] == before
    assert small._training.cache_info().currsize == 2
    assert len(small._chunks) == 1


def test_another_process_gets_the_same():
    script = (
        "from equilibra.integrations.reasoning_gym import reasoning_gym_task\nimport random\nrandom.seed()\n"
        "for name in ('chain_sum', 'list_functions', 'pool_matrix'):\n    task = reasoning_gym_task(name, seed=7)\n"
        "    print([task.problem(n) for n in range(20)], [task.held_out(n) for n in range(3)])"
    )
    found = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1]
    assert found[0].count("Problem(number=19") == 3


# --- names and options ---


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain_sums", "similar names are chain_sum"),
        ("sudoku2", "similar names are sudoku"),
        ("arithmetic", "basic_arithmetic"),
        ("zzzzzz", "it has [0-9]+, such as chain_sum"),
        ("", "such as chain_sum"),
    ],
)
def test_datasets_that_there_are_not(name, message):
    with pytest.raises(InputError, match=f"no dataset '{name}': .*{message}"):
        reasoning_gym_task(name)
    assert "chain_sum" in dataset_names()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"min_term": 3},
            "no option 'min_term': did you mean 'min_terms'.*its options are min_terms, max_terms, min_d",
        ),
        ({"colour": 3}, "no option 'colour': its options are min_terms"),
        ({"seed": 3}, "'seed' cannot be an option"),
        ({"size": 3}, "'size' cannot be an option"),
        ({"min_terms": 9, "max_terms": 2}, "'min_terms': 9.*max_terms must be >= min_terms"),
        ({"min_terms": "a"}, "cannot make the dataset 'chain_sum' with options"),
    ],
)
def test_options_that_there_are_not(options, message):
    with pytest.raises(InputError, match=message):
        reasoning_gym_task("chain_sum", options)


def test_a_mixture():
    parts = [{"name": "chain_sum", "weight": 2, "config": SMALL}, {"name": "gcd"}]
    task = reasoning_gym_task("composite", {"datasets": parts})
    problems = training(task, 40)
    assert {problem.metadata["metadata"]["source_dataset"] for problem in problems} == {"chain_sum", "gcd"}
    assert all(task.reward(problem, problem.answer) == 1.0 for problem in problems)
    for bad, message in [
        (None, "needs the option datasets"),
        ([], "needs the option datasets"),
        ([3], "has a name, weight and config"),
        ([{"weight": 1}], "has a name, weight and config"),
        ([{"name": "gcd", "wait": 1}], "has a name, weight and config"),
        ([{"name": "composite"}], "must not be composite"),
        ([{"name": "gdc"}], "similar names are gcd"),
        ([{"name": "gcd", "config": {"x": 1}}], "'gcd' has no option 'x'"),
        ([{"name": "gcd", "weight": -1}], "cannot make the dataset 'composite'"),
    ]:
        with pytest.raises(InputError, match=message):
            reasoning_gym_task("composite", {"datasets": bad} if bad is not None else {})


def test_numbers_and_shares():
    task = reasoning_gym_task("chain_sum", num_held_out=3)
    assert task.num_held_out == 3
    for call, message in [
        (lambda: task.problem(-1), "no problem -1"),
        (lambda: task.held_out(3), "no held-out problem 3"),
        (lambda: reasoning_gym_task("chain_sum", num_held_out=-1), "num_held_out must be a whole number from 0"),
        (lambda: reasoning_gym_task("chain_sum", held_out_share=1), "share"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


# --- datasets that misbehave ---


class Scripted:
    """A dataset whose entries and scores a test decides."""

    entries = staticmethod(lambda index, seed: f"question {seed} {index}")
    score = staticmethod(lambda answer: 1.0)

    def __init__(self, config) -> None:
        self.seed = config["seed"]

    def __getitem__(self, index):
        return {"question": type(self).entries(index, self.seed), "answer": None, "metadata": {}}

    def score_answer(self, answer, entry):
        return type(self).score(answer)


@pytest.fixture
def scripted(monkeypatch):
    def make(*, entries=None, score=None, **changes):
        given = {"entries": entries, "score": score}
        made = type("Made", (Scripted,), {name: staticmethod(what) for name, what in given.items() if what})
        monkeypatch.setattr(ours, "_registered", lambda: {"made": (made, lambda **options: options)})
        return ours.ReasoningGymTask(
            "made", **{"options": {}, "seed": 0, "num_held_out": 50, "held_out_share": 0.2, **changes}
        )

    return make


def test_too_few_different_problems(scripted):
    side = {True: [], False: []}
    for number in range(100):
        side[hash_of_prompt(f"q{number}") < 0.2 * 2**64].append(f"q{number}")
    task = scripted(entries=lambda index, seed: side[True][0])
    with pytest.raises(InputError, match="no training problem 7 in 100 tries: all were held-out ones"):
        task.problem(7)
    assert task.held_out(0).prompt == side[True][0]
    with pytest.raises(InputError, match="gave 1 distinct held-out problems in 550 tries, but 2 were asked for"):
        task.held_out(1)
    task = scripted(entries=lambda index, seed: [*side[False][:2], *side[True][:3]][(seed + index) % 5])
    assert {task.problem(number).prompt for number in range(50)} == set(side[False][:2])
    assert {task.held_out(number).prompt for number in range(3)} == set(side[True][:3])
    with pytest.raises(InputError, match="gave 3 distinct held-out problems"):
        task.held_out(3)


def test_a_dataset_that_sometimes_fails(scripted):
    def entries(index, seed):
        if (index + seed) % 3 == 0:
            raise IndexError("exhausted")
        return f"question {seed} {index}"

    task = scripted(entries=entries)
    assert len({problem.prompt for problem in training(task, 30)}) == 30
    assert task.held_out(9)
    always = scripted(entries=lambda index, seed: 1 / 0)
    with pytest.raises(InputError, match="no training problem 0 in 100 tries: ZeroDivisionError"):
        always.problem(0)
    with pytest.raises(InputError, match=r"0 distinct held-out problems .* asked for: ZeroDivisionError"):
        always.held_out(0)


class Shrinking(Scripted):
    """Fails at one index, and from then on for all behind it, as word_ladder does."""

    end = 500

    def __getitem__(self, index):
        if index >= self.end or (index == 3 and self.seed == ours._derived_seed(0, "train", 0, 0)):
            self.end = min(self.end, index)
            raise IndexError("exhausted")
        return super().__getitem__(index)


def test_a_dataset_that_shrinks_when_it_fails(monkeypatch):
    monkeypatch.setattr(ours, "_registered", lambda: {"made": (Shrinking, lambda **options: options)})
    one, other = (
        ours.ReasoningGymTask("made", options={}, seed=0, num_held_out=9, held_out_share=0.2) for _ in range(2)
    )
    assert training(one, 20) == [other.problem(number) for number in reversed(range(20))][::-1]


def legacy_state():
    state = np.random.get_state()  # noqa: NPY002 - the library draws from it
    return state[1].tolist(), state[2:]


def test_nothing_global_goes_in_or_comes_out(scripted, capsys):
    def entries(index, seed):
        warnings.warn("odd", stacklevel=1)
        print("loud")
        return f"{random.random()} {np.random.random()}"  # noqa: NPY002 - as the library does

    task = scripted(entries=entries)
    random.seed(1)
    before = random.getstate(), legacy_state()
    first = task.problem(3)
    assert (random.getstate(), legacy_state()) == before
    random.seed(2)
    assert scripted(entries=entries).problem(3) == first
    assert scripted(entries=entries).problem(4).prompt != first.prompt
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("score", "reward"),
    [
        (0.3, 0.3),
        (7, 1.0),
        (-1, 0.0),
        (float("nan"), 0.0),
        (float("inf"), 0.0),
        (None, 0.0),
        ("x", 0.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_scores_of_all_kinds(scripted, score, reward):
    task = scripted(score=lambda answer: score)
    assert task.reward(task.problem(0), "answer") == reward
    assert task.problem(0).answer == ""  # the dataset has none


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, AssertionError])
def test_a_scorer_that_fails_gives_nothing(scripted, error):
    def score(answer):
        raise error

    task = scripted(score=score)
    assert task.reward(task.problem(0), "answer") == 0.0


def test_a_scorer_that_fails_on_garbage():
    task = reasoning_gym_task("prime_factorization")
    problem = task.problem(0)
    with pytest.raises(ValueError, match="invalid literal"):  # the control: the library's own raises
        task._scorer.score_answer("garbage", problem.metadata)
    assert task.reward(problem, "garbage") == 0.0
    assert task.reward(problem, problem.answer) == 1.0


# --- answers that are run as code ---


def test_the_list_of_scorers_that_run_answers_is_complete():
    own_only = {"number_sorting"}  # evaluates its own entry, not the answer
    found = {
        name for name, (made, _) in ours._registered().items()
        if re.search(r"\b(eval|exec|parse_expr|sympify)\(", inspect.getsource(made.score_answer))
    }  # fmt: skip
    assert found - own_only == ours.RUN_AS_CODE


@pytest.mark.parametrize(
    "name", sorted(ours.RUN_AS_CODE - ours.ORDER_OF_SETS - {"intermediate_integration", "puzzle24"})
)
def test_right_answers_get_through(name):
    task = reasoning_gym_task(name)
    assert [task.reward(problem, problem.answer) for problem in training(task, 6)] == [1.0] * 6


def test_answers_do_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = reasoning_gym_task("string_insertion")
    problem = task.problem(0)
    attack = "[open('made', 'w')]"
    assert task.reward(problem, attack) == 0.0
    assert not (tmp_path / "made").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task._scorer.score_answer(attack, problem.metadata)
    assert (tmp_path / "made").exists()  # the control: the library runs it


HARMFUL = [
    "open('x')", "(open)('x')", "[open][0]('x')", "open ('x')", "open\n('x')", "open\\\n('x')", "__import__", "().a",
    "x. a", "f'{open}'", "lambda: 1", "ｏpen('x')", "open#\n('x')", "9**9**9", "9**999", "9**(9**9)", "99999!",
    "((9**9)**99)**99**9", "[0]*99999", "'a'*9**9", "1e99999", "1<<999", "1" * 1001, "9**9.5",
    "((((9)**99)**99)**99)**99",
]  # fmt: skip
HARMLESS = [
    "", "42", "1 + 2*(3 - 4)/5", "x**3/3 + C", "-x**10/2 + x**(1/2)", "[1, 2, 3]", "['A', 'B']", "A B C",
    "_ Q _\nQ _ _", "(x + 1)**3 - 2*x**2", "3.5*x", "99999999999",
]  # fmt: skip


@pytest.mark.parametrize("answer", HARMFUL)
def test_harmful_answers(answer):
    assert not ours._is_harmless(answer, functions=ours.FUNCTIONS)


@pytest.mark.parametrize("answer", HARMLESS)
def test_harmless_answers(answer):
    assert ours._is_harmless(answer, functions=())


def test_functions_only_where_they_belong():
    assert ours._is_harmless("sin(x)*exp(2*x) + C", functions=ours.FUNCTIONS)
    assert not ours._is_harmless("sin(x)", functions=())
    task = reasoning_gym_task("countdown")
    assert task.reward(task.problem(0), "exp(exp(exp(9)))") == 0.0


# --- what differs from process to process ---


def test_datasets_that_need_a_hash_seed(monkeypatch):
    class Flags:
        hash_randomization = 1

    monkeypatch.setattr(ours.sys, "flags", Flags)
    for make in (
        lambda: reasoning_gym_task("ransom_note"),
        lambda: reasoning_gym_task("composite", {"datasets": [{"name": "ransom_note"}]}),
    ):
        with pytest.raises(InputError, match="PYTHONHASHSEED=0"):
            make()
    Flags.hash_randomization = 0
    assert isinstance(reasoning_gym_task("ransom_note").problem(0), Problem)
    with pytest.raises(InputError, match="change with the clock"):
        reasoning_gym_task("codeio")


@pytest.mark.slow
def test_every_dataset_in_every_process():
    script = (
        "from equilibra.integrations.reasoning_gym import *\nfrom equilibra.integrations import reasoning_gym as ours\n"
        "for name in dataset_names():\n"
        "    if name in {'composite', *ours.ORDER_OF_SETS, *ours.READS_CLOCK}: continue\n"
        "    task = reasoning_gym_task(name, seed=1)\n"
        "    problems = [task.problem(n) for n in (4, 0, 2)] + [task.held_out(0)]\n"
        "    rewards = [task.reward(p, a) for p in problems for a in (p.answer, '', 'garbage {', '0')]\n"
        "    assert all(0 <= reward <= 1 for reward in rewards), name\n"
        "    assert not problems[0].answer or rewards[0] > 0.9, name\n"
        "    print(name, problems, rewards)"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    found = [process.communicate(timeout=900)[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert len(found[0]) >= 95
    assert [one.split()[0] for one, other in zip(*found, strict=True) if one != other] == []
