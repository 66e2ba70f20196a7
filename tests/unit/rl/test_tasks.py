"""Final answers, a user's own reward, and what every task promises."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.rl.jsonl import final_answer, jsonl_task, same_final_answer
from equilibra.rl.tasks import Problem, RewardFunction, check_number, hash_of_prompt, reward_function


def test_hash_of_prompt_is_the_published_sha256():
    assert hash_of_prompt("abc") == 0xBA7816BF8F01CFEA  # FIPS 180-2, first eight bytes
    assert hash_of_prompt("abd") != hash_of_prompt("abc")


def test_numbers_that_there_are_not():
    check_number("sums", 0)
    check_number("sums", 2, 3)
    with pytest.raises(InputError, match="sums has no problem -1"):
        check_number("sums", -1)
    with pytest.raises(InputError, match="sums has no held-out problem 3: it has 3"):
        check_number("sums", 3, 3)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1\nno, wait\n#### 2 \nbye", "2"),
        ("####", ""),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{1 {2", None),
        ("7", None),
        ("", None),
    ],
)
def test_final_answer(text, found):
    assert final_answer(text) == found


SAME = [
    ("#### 72", "so it is 72"),
    ("#### 72", "72."),
    ("#### 72", "#### 72 apples"),
    ("#### 1,234", "$1234.00"),
    ("#### 1234", "that makes 1,234 dollars."),
    ("72", "12 and 60 are 72"),
    ("-5", "x = -5"),
    ("-5", "x=\N{MINUS SIGN}5"),
    ("2", "5-2"),  # an operator, no sign
    ("1/2", "0.5"),
    (r"\boxed{\frac{3}{4}}", r"\boxed{0.75}"),
    (r"\boxed{\$18}", "18"),
    ("50%", "50"),
    (".5", "1/2"),
    ("1e3", "1000"),
    ("Paris", " Paris. "),
    ("Paris", "I think #### Paris"),
    ("x^2", r"\boxed{x^2}"),
]
DIFFERENT = [
    ("#### 72", "so it is 73"),
    ("#### 72", "72 or 73"),
    ("#### 72", "#### 71 or 72"),
    ("#### 72", ""),
    ("#### 72", "####"),
    ("#### 72", r"72 \boxed{71}"),
    ("72", "x72"),
    ("72", "172"),
    ("72", "7 2"),
    ("1234", "1,23,4"),
    ("-5", "5"),
    ("3", "5-2"),
    ("1/2", "1/3"),
    ("0", "1/0"),
    ("Paris", "paris"),
    ("Paris", "London, not Paris"),
    ("x^2", "2"),
    ("2 and 3", "3"),
]


@pytest.mark.parametrize(("expected", "given"), SAME)
def test_the_same_final_answer(expected, given):
    assert same_final_answer(expected, given)


@pytest.mark.parametrize(("expected", "given"), DIFFERENT)
def test_another_final_answer(expected, given):
    assert not same_final_answer(expected, given)


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "1e999", "1/" + "0" * 5000, "{" * 50_000, r"\boxed{" * 20_000, "1 " * 50_000]
)
def test_long_answers_are_judged_at_once(text):
    assert not same_final_answer("7", text)
    assert same_final_answer("#### 7", text + " #### 7")


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{n} + 1?", "answer": "{n + 1}"}}' for n in range(10)))
    return jsonl_task(path)


@pytest.fixture
def from_file(tmp_path):
    def load(body: str, name: str = "score") -> RewardFunction:
        (tmp_path / "mine.py").write_text(body)
        return reward_function(f"{tmp_path / 'mine.py'}:{name}")

    return load


def test_a_reward_from_a_file_gets_prompt_answer_and_expected(from_file, task):
    seen = from_file(
        "seen = []\ndef score(prompt, answer, expected):\n    seen.append((prompt, answer, expected))\n    return 0.25"
    )
    problem = task.problem(3)
    assert seen.reward(problem, "words") == 0.25
    assert seen.function.__globals__["seen"] == [(problem.prompt, "words", problem.answer)]
    assert task.reward(problem, "words") == 0.0  # the task's own, to compare


def test_a_reward_from_a_module(tmp_path, monkeypatch, task):
    (tmp_path / "own_rewards_for_test.py").write_text("def score(prompt, answer, expected): return answer == expected")
    monkeypatch.syspath_prepend(tmp_path)
    own, problem = reward_function("own_rewards_for_test:score"), task.problem(0)
    assert own.reward(problem, problem.answer) == 1.0
    assert own.reward(problem, "") == 0.0
    del sys.modules["own_rewards_for_test"]


def test_a_reward_in_a_file_may_hold_dataclasses_and_be_an_object(from_file, task):
    body = (
        "from dataclasses import dataclass\n@dataclass\nclass Score:\n    x: 'float'\n"
        "    def __call__(self, prompt, answer, expected): return self.x\nscore = Score(0.5)"
    )
    assert from_file(body).reward(task.problem(0), "") == 0.5


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("nothing", "write path/to/file.py:function"),
        ("a/b.py:", "write"),
        (":f", "write"),
        ("/no/such/file.py:f", "/no/such/file.py: it must be a file"),
        ("/etc/passwd:f", "ends in .py"),
        ("no_such_package_at_all.x:f", "no_such_package_at_all"),
        ("json:dumpz", "has no function 'dumpz'; it has dump"),
        ("json:__doc__", "has no function '__doc__'"),
        ("re:sub", None),
        ("json:load", "called as load\\(prompt, answer, expected\\), and too many positional"),
    ],
)
def test_rewards_that_are_not_there(named, message):
    if message is None:
        assert reward_function(named).named == named
        return
    with pytest.raises(InputError, match=message):
        reward_function(named)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def score(:", "mine.py: SyntaxError"),
        ("1 / 0", "mine.py: ZeroDivisionError"),
        ("import sys; sys.exit(3)", "mine.py: SystemExit: 3"),
        ("score = 3", "has no function 'score'; it has none"),
        ("def other(): pass", "has no function 'score'; it has other"),
        ("def score(prompt, answer): return 1", "is called as score\\(prompt, answer, expected\\)"),
    ],
)
def test_files_that_hold_no_reward(from_file, body, message):
    before = set(sys.modules)
    with pytest.raises(InputError, match=message):
        from_file(body)
    left = [name for name in set(sys.modules) - before if name.startswith("equilibra_reward_")]
    assert len(left) == ("function" in message or "called" in message)  # what could not be run is forgotten


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1 / 0", "problem 4 of sums.jsonl raised ZeroDivisionError"),
        ("exit(1)", "problem 4 of sums.jsonl raised SystemExit"),
        ("None", "is None: it must be a number"),
        ("'1'", "is '1': it must be a number"),
        ("1j", "is 1j: it must be a number"),
        ("float('nan')", "is nan: it must be from 0 to 1"),
        ("float('inf')", "is inf: it must be from 0 to 1"),
        ("-0.1", "is -0.1: it must be from 0 to 1"),
        ("2", "is 2: it must be from 0 to 1"),
    ],
)
def test_rewards_that_go_wrong(from_file, task, value, message):
    own = replace(from_file(f"def score(prompt, answer, expected): return {value}"), task=task.name)
    with pytest.raises(InputError, match=message):
        own.reward(task.problem(4), "")


@pytest.mark.parametrize("value", [True, 1, 0.5, np.float32(0.5), np.int64(1), np.True_])
def test_numbers_of_all_kinds_are_rewards(value):
    own = RewardFunction(named="it", function=lambda *_: value)
    reward = own.reward(Problem(number=0, prompt="a", answer="b"), "")
    assert type(reward) is float
    assert reward == float(value)


def test_a_keyboard_interrupt_goes_through():
    def stop(*_: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RewardFunction(named="it", function=stop).reward(Problem(number=0, prompt="a", answer="b"), "")
