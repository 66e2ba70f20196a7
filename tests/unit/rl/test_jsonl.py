"""Problems from a JSONL file: the split, the order, and files that are not right."""

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest

from equilibra.core.errors import InputError
from equilibra.rl import jsonl
from equilibra.rl.jsonl import jsonl_task
from equilibra.rl.tasks import hash_of_prompt


@pytest.fixture
def write(tmp_path):
    def written(lines, name="problems.jsonl"):
        path = tmp_path / name
        content = lines if isinstance(lines, bytes) else "\n".join(
            line if isinstance(line, str) else json.dumps(line) for line in lines
        ).encode()  # fmt: skip
        path.write_bytes(content)
        return path

    return written


def sums(count: int, key: str = "question") -> list[dict[str, str]]:
    return [{key: f"{n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(count)]


def prompts_of(task, count):
    return [task.problem(number).prompt for number in range(count)]


@pytest.mark.parametrize("key", ["question", "prompt"])
def test_problems_and_rewards(write, key):
    task = jsonl_task(write(sums(30, key)))
    assert (task.name, task.num_held_out) == ("problems.jsonl", 3)
    for problem in [*map(task.problem, range(27)), *map(task.held_out, range(3))]:
        n = int(problem.prompt.split()[0])
        assert problem.answer.endswith(f"#### {2 * n}")
        assert task.reward(problem, f"it is {2 * n}.") == 1.0
        assert task.reward(problem, f"it is {2 * n + 1}.") == 0.0
    assert [task.problem(n).number for n in (0, 26, 27, 1000)] == [0, 26, 27, 1000]


def test_every_pass_is_a_permutation_of_its_own(write):
    path = write(sums(30))
    task = jsonl_task(path, seed=3)
    passes = [tuple(prompts_of(task, 27 * 4)[first : first + 27]) for first in range(0, 108, 27)]
    assert len(set(passes)) == 4
    assert len({frozenset(one) for one in passes}) == 1
    assert all(len(set(one)) == 27 for one in passes)
    again, other = jsonl_task(path, seed=3), jsonl_task(path, seed=4)
    backwards = [again.problem(number).prompt for number in reversed(range(108))][::-1]
    assert backwards == [prompt for one in passes for prompt in one]
    assert prompts_of(other, 27) != list(passes[0])
    assert task.problem(10**30).prompt in passes[0]


def test_the_split_depends_on_prompts_alone(write):
    lines = sums(200)
    task = jsonl_task(write(lines), seed=1)
    held_out = [task.held_out(n).prompt for n in range(task.num_held_out)]
    training = set(prompts_of(task, 180))
    assert len(set(held_out)) == 20
    assert not training & set(held_out)
    assert training | set(held_out) == {line["question"] for line in lines}
    assert max(map(hash_of_prompt, held_out)) < min(map(hash_of_prompt, training))
    random.Random(5).shuffle(lines)
    shuffled = jsonl_task(write(lines), seed=2)
    assert [shuffled.held_out(n) for n in range(20)] == [task.held_out(n) for n in range(20)]
    half = jsonl_task(write(lines), held_out_share=0.5)
    assert [half.held_out(n).prompt for n in range(20)] == held_out  # a larger share keeps those of a smaller one
    assert half.num_held_out == 100


def test_copies_of_a_prompt_fall_on_one_side(write):
    lines = [{"prompt": f"p{n % 20}", "answer": str(n)} for n in range(60)]
    task = jsonl_task(write(lines))
    held_out = {task.held_out(n).prompt for n in range(task.num_held_out)}
    assert task.num_held_out == len(held_out) == 2
    training = prompts_of(task, 54)
    assert not held_out & set(training)
    assert all(training.count(prompt) == 3 for prompt in training)
    turned = jsonl_task(write(lines[::-1]))
    assert [turned.held_out(n) for n in range(2)] == [task.held_out(n) for n in range(2)]


@pytest.mark.parametrize(
    ("count", "share", "held_out"), [(2, 0.1, 1), (2, 0.99, 1), (14, 0.1, 1), (16, 0.1, 2), (10, 0.95, 9)]
)
def test_both_sides_have_at_least_one(write, count, share, held_out):
    task = jsonl_task(write(sums(count)), held_out_share=share)
    assert task.num_held_out == held_out
    assert len(set(prompts_of(task, 3 * count))) == count - held_out


def test_another_process_gets_the_same(write):
    path = write(sums(50))
    script = (
        "import sys\nfrom equilibra.rl.jsonl import jsonl_task\ntask = jsonl_task(sys.argv[1], seed=7)\n"
        "print([task.problem(n).prompt for n in range(100)] + [task.held_out(n).prompt for n in range(5)])"
    )
    task = jsonl_task(path, seed=7)
    own = str([*prompts_of(task, 100), *(task.held_out(n).prompt for n in range(5))])
    ran = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )  # fmt: skip
    assert ran.stdout.strip() == own
    assert hashlib.sha256(own.encode()).hexdigest()[:16] == "c04b34035737b1a2"  # and so do other machines


def test_what_is_let_through(write):
    lines = [
        '\ufeff{"question": "a", "answer": 5, "more": [1]}', "", "   ", '{"prompt": "b", "answer": 2.5}\r',
        '{"prompt": "\\u00e9 \\n\\u0000", "answer": "x"}',
    ]  # fmt: skip
    task = jsonl_task(write(lines))
    problems = {p.prompt: p for p in (*map(task.problem, range(2)), task.held_out(0))}
    assert set(problems) == {"a", "b", "é \n\0"}
    assert task.reward(problems["a"], "5.0") == 1.0
    assert problems["b"].answer == "2.5"
    assert problems["b"].metadata == {"line": 4}


GOOD = '{"question": "a", "answer": "b"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"question": "a", "answer": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"question": "a", "answer": NaN}', "NaN is not valid JSON"),
        ("[1, 2]", "must be an object like"),
        ('"text"', "must be an object like"),
        ('{"answer": "b"}', "its keys are 'answer'"),
        ('{"question": "a"}', "its keys are 'question'"),
        ("{}", "its keys are none"),
        ('{"question": "a", "prompt": "a", "answer": "b"}', "one of"),
        ('{"question": 3, "answer": "b"}', "'question' must be non-empty text, not 3"),
        ('{"question": "", "answer": "b"}', "'question' must be non-empty text"),
        ('{"question": ["a"], "answer": "b"}', "'question' must be non-empty text"),
        ('{"question": "a", "answer": null}', "'answer' must be non-empty text or a number, not None"),
        ('{"question": "a", "answer": true}', "'answer' must be non-empty text or a number"),
        ('{"question": "a", "answer": " "}', "'answer' must be non-empty text or a number"),
        ('{"question": "\\ud800", "answer": "b"}', "lone surrogate"),
    ],
)
def test_a_bad_line_is_named(write, line, message):
    path = write([GOOD, "", line, GOOD])
    with pytest.raises(InputError, match=message) as caught:
        jsonl_task(path)
    assert f"{path}, line 3: " in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_bytes_that_are_no_text(write):
    path = write(GOOD.encode() + b'\n{"question": "\xff\xfe", "answer": "b"}\n')
    with pytest.raises(InputError, match=r"line 2: not UTF-8 .*at byte 14"):
        jsonl_task(path)
    with pytest.raises(InputError, match="line 1: not UTF-8"):
        jsonl_task(write("\n".join([GOOD] * 3).encode("utf-16")))


def test_a_line_without_end(write, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    jsonl_task(write([GOOD, '{"question": "' + "a" * 900 + '", "answer": "b"}']))
    with pytest.raises(InputError, match="line 2: longer than 1000 bytes"):
        jsonl_task(write([GOOD, '{"question": "' + "a" * 1000 + '", "answer": "b"}']))


def test_a_file_too_large(write, monkeypatch):
    path = write(sums(10))
    monkeypatch.setattr(jsonl, "MAX_FILE_BYTES", 100)
    with pytest.raises(InputError, match=r"problems\.jsonl: it must be a file of at most 100 bytes"):
        jsonl_task(path)


def test_no_file_at_all(tmp_path):
    with pytest.raises(InputError, match=r"no\.jsonl: No such file"):
        jsonl_task(tmp_path / "no.jsonl")
    with pytest.raises(InputError, match="it is a folder"):
        jsonl_task(tmp_path)
    with pytest.raises(InputError, match="must be a file"):
        jsonl_task("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="must be a file"):
        jsonl_task(tmp_path / "pipe")


@pytest.mark.parametrize(("lines", "number"), [(b"", 0), (b"\n \n", 0), ([GOOD], 1), ([GOOD, GOOD], 1)])
def test_too_few_problems(write, lines, number):
    with pytest.raises(InputError, match=f"problems.jsonl has {number} different prompt"):
        jsonl_task(write(lines))


@pytest.mark.parametrize("share", [0, 1, -0.1, 2, float("nan")])
def test_shares_that_leave_nothing(write, share):
    with pytest.raises(InputError, match="share of held-out problems"):
        jsonl_task(write(sums(10)), held_out_share=share)


def test_numbers_that_there_are_not(write):
    task = jsonl_task(write(sums(10)))
    with pytest.raises(InputError, match="no problem -1"):
        task.problem(-1)
    with pytest.raises(InputError, match="no held-out problem 1"):
        task.held_out(1)
