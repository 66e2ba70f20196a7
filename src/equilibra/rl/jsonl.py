r"""Problems from a file: one JSON object per line, as GSM8K has them.

    {"question": "Ann has 3 apples and buys 4. How many has she?", "answer": "3 + 4 = 7\n#### 7"}

"prompt" may replace "question"; other keys and empty lines are ignored. The reward is 1 for the right final answer and
0 otherwise. Held-out problems are the prompts with the smallest hashes, whatever the order of lines and the seed.
Training shuffles the other lines anew on every pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from equilibra.core import checks
from equilibra.core.atomic import cannot
from equilibra.core.errors import InputError
from equilibra.rl.tasks import Problem, check_number, hash_of_prompt

MARK, BOX = "####", r"\boxed{"
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?!\w))?|\.[0-9]+"
NUMBER = re.compile(rf"(?<!\w)(?P<sign>(?<![)\]])[-+]\$?|\$-?)?(?P<over>{UNSIGNED})(?: ?/ ?(?P<under>[0-9]+))?%?")


def final_answer(text: str) -> str | None:
    r"""The text after the last "####" or in the last \boxed{...}; None without either."""
    if MARK in text:
        behind = text.rpartition(MARK)[2].strip()
        return behind.splitlines()[0].strip() if behind else ""
    start = text.rfind(BOX)
    depth = 0
    for place in range(start + len(BOX) - 1, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(BOX) : place]
    return None


def same_final_answer(expected: str, given: str) -> bool:
    """Whether a given answer ends in the expected result, as GSM8K and MATH write it.

    An expected answer without a marked result is a result as a whole; a given one counts by its last number. Numbers
    are compared as numbers (1,234.50 = $1234.5 = 2469/2), anything else as text.
    """
    wanted, found = final_answer(expected), final_answer(given)
    wanted = _plain(expected if wanted is None else wanted)
    number = NUMBER.fullmatch(wanted)
    value = None if number is None else _value(number)
    if value is None:
        return wanted == _plain(given if found is None else found)
    if found is None:
        return _numbers(given)[-1:] == [value]
    return _numbers(found) == [value]  # "72 apples" is a result, "71 or 72" is not


def _plain(text: str) -> str:
    text = text.replace("\N{MINUS SIGN}", "-").replace(r"\$", "$").replace(r"\%", "%")
    return FRACTION.sub(r"\1/\2", text).strip().removesuffix(".").rstrip()


def _numbers(text: str) -> list[Fraction]:
    found = (_value(match) for match in NUMBER.finditer(_plain(text)))
    return [value for value in found if value is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    """The number; None for a division by zero or too many digits."""
    try:
        size = Fraction(match["over"].replace(",", "")) / Fraction(match["under"] or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return -size if "-" in (match["sign"] or "") else size


MAX_LINE_BYTES, MAX_FILE_BYTES = 4 << 20, 4 << 30
EXAMPLE = '{"question": "2 + 3?", "answer": "5"}'


@dataclass(frozen=True, kw_only=True)
class JsonlTask:
    """The problems of a file; made by `jsonl_task`."""

    name: str
    """name of the file"""
    seed: int
    """seed of the training order"""
    training: tuple[Problem, ...]
    """in the order of lines"""
    kept_out: tuple[Problem, ...]
    """one per prompt, ordered by hash"""

    @property
    def num_held_out(self) -> int:
        return len(self.kept_out)

    def problem(self, number: int) -> Problem:
        """A training problem; every pass over the lines has its own order."""
        check_number(self.name, number)
        passes, place = divmod(number, len(self.training))
        line = int(_order(self.seed, passes, len(self.training))[place])
        return replace(self.training[line], number=number)

    def held_out(self, number: int) -> Problem:
        check_number(self.name, number, self.num_held_out)
        return replace(self.kept_out[number], number=number)

    def reward(self, problem: Problem, answer_text: str) -> float:
        return float(same_final_answer(problem.answer, answer_text))


def jsonl_task(path: Path | str, *, seed: int = 0, held_out_share: float = 0.1) -> JsonlTask:
    """Read a file; hold out a share of its prompts (between 0 and 1), at least one."""
    checks.check_number("the share of held-out problems", held_out_share, above=0, high=1, below=True)
    path = Path(path)
    lines = _read(path)
    prompts = sorted({line.prompt for line in lines}, key=lambda prompt: (hash_of_prompt(prompt), prompt))
    if len(prompts) < 2:
        raise InputError(
            f"{path} has {len(prompts)} different prompts: training and evaluation need at least one each; add more"
        )
    num_held_out = min(max(1, round(held_out_share * len(prompts))), len(prompts) - 1)
    answers: dict[str, list[Problem]] = {prompt: [] for prompt in prompts[:num_held_out]}
    for line in lines:
        answers.get(line.prompt, []).append(line)
    return JsonlTask(
        name=path.name,
        seed=seed,
        training=tuple(line for line in lines if line.prompt not in answers),
        kept_out=tuple(min(same, key=lambda line: line.answer) for same in answers.values()),
    )


@lru_cache(maxsize=2)
def _order(seed: int, passes: int, num_lines: int) -> NDArray[np.int64]:
    """A permutation per pass, made from raw bits: the same with every numpy release."""
    return np.random.Philox(key=[seed % (1 << 64), passes % (1 << 64)]).random_raw(num_lines).argsort(kind="stable")


def _read(path: Path) -> list[Problem]:
    try:
        if path.is_dir():
            raise InputError(f"cannot read {path}: it is a folder; give a file with one problem per line")
        size = path.stat().st_size
        if not path.is_file() or size > MAX_FILE_BYTES:
            raise InputError(f"cannot read {path}: it must be a file of at most {MAX_FILE_BYTES} bytes, not {size}")
        with path.open("rb") as file:
            return [_line(path, number, text) for number, text in _texts(path, file) if text.strip()]
    except OSError as error:
        raise cannot("read", path, error) from error


def _texts(path: Path, file: IO[bytes]) -> Iterator[tuple[int, str]]:
    number = 0
    while content := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(content) > MAX_LINE_BYTES:
            _refuse(path, number, f"longer than {MAX_LINE_BYTES} bytes; write one problem per line")
        try:
            yield number, content.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            _refuse(path, number, f"not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8")


def _line(path: Path, number: int, text: str) -> Problem:
    try:
        entry = json.loads(text, parse_constant=lambda word: _refuse(path, number, f"{word} is not valid JSON"))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        _refuse(path, number, f"not valid JSON ({error}); write lines like {EXAMPLE}")
    if not isinstance(entry, dict):
        _refuse(path, number, f"must be an object like {EXAMPLE}, not {type(entry).__name__}")
    asked = [key for key in ("question", "prompt") if key in entry]
    if len(asked) != 1 or "answer" not in entry:
        keys = ", ".join(map(repr, list(entry)[:8])) or "none"
        _refuse(path, number, f'must have "answer" and one of "question" and "prompt"; its keys are {keys}')
    return Problem(
        number=0,  # not yet known
        prompt=_text(path, number, asked[0], entry[asked[0]]),
        answer=_text(path, number, "answer", entry["answer"]),
        metadata={"line": number},
    )


def _text(path: Path, number: int, key: str, value: Any) -> str:  # noqa: ANN401 - whatever JSON holds
    if key == "answer" and type(value) in (int, float):
        return repr(value)
    if not isinstance(value, str) or not value.strip():
        wanted = "text or a number" if key == "answer" else "text"
        _refuse(path, number, f"{key!r} must be non-empty {wanted}, not {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(path, number, f"{key!r} has a lone surrogate (\\ud800 to \\udfff), which no tokenizer accepts")
    return value


def _refuse(path: Path, number: int, why: str) -> NoReturn:
    raise InputError(f"{path}, line {number}: {why}")
