"""Problems from reasoning-gym: any of its datasets, by name, with its options.

Its datasets are virtual: an entry is generated from a seed and an index when asked for. Some do work in proportion
to their size when they are opened, and one refuses large ones, so problems come from chunks of 500, each with a seed of
its own: the chunks of a number's first try, of its second, and so on. A training problem whose prompt hashes to the
held-out side is replaced by the next try; held-out problems are the first different ones of a stream of their own that
hash to their side. So no prompt is on both sides, and no list of prompts is kept.

What the library leaves to chance is settled here: Python's and numpy's global random numbers are seeded for the time of
the call, its warnings and prints stay inside, and datasets that depend on the order of sets need PYTHONHASHSEED=0. Some
scorers run the answer as Python code: only arithmetic and plain lists get that far. One dataset, codeio, is refused:
its entries are made by code that reads the clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from typing import Any

import numpy as np

from equilibra.core.errors import InputError
from equilibra.rl.tasks.task import Problem, RewardFunction, Task, check_number, check_share, hash_of_prompt, judged

__all__ = ["ReasoningGymTask", "dataset_names", "reasoning_gym_task"]

CHUNK = 500
CHUNKS_KEPT, PROBLEMS_KEPT = 8, 4096
TRIES = 100
OURS = frozenset({"seed", "size"})
ORDER_OF_SETS = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""datasets whose entries change with Python's hash seed"""
READS_CLOCK = frozenset({"codeio"})
"""datasets whose entries are never the same twice"""
RUN_AS_CODE = frozenset(
    {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
     "simple_integration", "spiral_matrix", "string_insertion"}
)  # fmt: skip
"""datasets whose scorers evaluate the answer"""
FUNCTIONS = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", "ln", "sqrt", "Abs", "abs"})
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def dataset_names() -> list[str]:
    """All datasets that there are."""
    return sorted(_registered())


class ReasoningGymTask:
    """The problems of one dataset; `reasoning_gym_task` makes it."""

    def __init__(
        self, name: str, *, options: Mapping[str, Any], seed: int, num_held_out: int, held_out_share: float
    ) -> None:
        self._dataset_name, self._options, self._seed = name, dict(options), seed
        self._num_held_out, self._share = num_held_out, held_out_share
        self._chunks: dict[tuple[object, ...], Any] = {}
        self._problems: dict[int, Problem] = {}
        self._kept_out: list[Problem] = []
        self._tried = 0
        self._scorer = self._chunk("train", 0, 0)

    @property
    def name(self) -> str:
        """reasoning-gym/ and the dataset's."""
        return f"reasoning-gym/{self._dataset_name}"

    @property
    def num_held_out(self) -> int:
        """How many held-out problems may be asked for; whether there are so many shows when they are."""
        return self._num_held_out

    def problem(self, number: int) -> Problem:
        """A training problem; the last few thousand are remembered, since a group's answers all ask for theirs."""
        check_number(self.name, number)
        if number not in self._problems:
            _make_room(self._problems, PROBLEMS_KEPT)
            self._problems[number] = self._training(number)
        return self._problems[number]

    def _training(self, number: int) -> Problem:
        failed = ""
        for attempt in range(TRIES):
            problem, failed = self._candidate("train", attempt, number)
            if problem is not None and not self._is_held_out(problem):
                return problem
        raise InputError(
            f"{self.name} gave no training problem {number} in {TRIES} tries: {failed or 'all were held-out ones'}; "
            f"choose options with more different problems, not {self._options}"
        )

    def held_out(self, number: int) -> Problem:
        """A held-out problem; all of them differ."""
        check_number(self.name, number, self.num_held_out)
        most = math.ceil((number + 10) * 10 / self._share)
        prompts, failed = {problem.prompt for problem in self._kept_out}, ""
        while len(self._kept_out) <= number and self._tried < most:
            problem, failed = self._candidate("held-out", 0, self._tried)
            self._tried += 1
            if problem is not None and self._is_held_out(problem) and problem.prompt not in prompts:
                prompts.add(problem.prompt)
                self._kept_out.append(dataclasses.replace(problem, number=len(self._kept_out)))
        if len(self._kept_out) <= number:
            raise InputError(
                f"{self.name} gave {len(self._kept_out)} different held-out problems in {self._tried} tries, and "
                f"{number + 1} were asked for{': ' * bool(failed)}{failed}; ask for fewer, or choose options "
                f"with more different problems, not {self._options}"
            )
        return self._kept_out[number]

    def reward(self, problem: Problem, answer_text: str) -> float:
        """The dataset's own score of what stands in <answer> tags, or of the whole text; 0 where it fails."""
        tagged = TAGGED.findall(answer_text)
        answer = (tagged[-1] if tagged else answer_text).strip()
        entry: Any = problem.metadata
        source = entry["metadata"].get("source_dataset", self._dataset_name)
        if source in RUN_AS_CODE and not _is_harmless(answer, functions=FUNCTIONS if "integr" in source else ()):
            return 0.0
        try:
            with _settled(0):
                score = float(self._scorer.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 - scorers raise anything on answers they do not expect
            return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0

    def _is_held_out(self, problem: Problem) -> bool:
        return hash_of_prompt(problem.prompt) < self._share * 2.0**64

    def _candidate(self, stream: str, attempt: int, number: int) -> tuple[Problem | None, str]:
        """A problem of either side, or why there is none."""
        chunk, place = divmod(number, CHUNK)
        try:
            with _settled(_derived_seed(self._seed, stream, attempt, number)):
                entry = self._chunk(stream, attempt, chunk)[place]
                problem = Problem(number=number, prompt=str(entry["question"]), answer=_text(entry), metadata=entry)
                problem.prompt.encode()  # half a character cannot be
        except Exception as error:  # noqa: BLE001 - generators raise anything when they find no problem
            self._chunks.pop((stream, attempt, chunk), None)  # one shrinks when it fails
            return None, f"{type(error).__name__}: {error}"
        return problem, ""

    def _chunk(self, stream: str, attempt: int, chunk: int) -> Any:  # noqa: ANN401 - the library has no types
        key = (stream, attempt, chunk)
        if key not in self._chunks:
            _make_room(self._chunks, CHUNKS_KEPT)
            seed = _derived_seed(self._seed, *key)
            self._chunks[key] = _create(self._dataset_name, {**self._options, "seed": seed, "size": CHUNK})
        return self._chunks[key]


def reasoning_gym_task(
    name: str, options: Mapping[str, Any] | None = None, *, seed: int = 0, reward: RewardFunction | None = None,
    num_held_out: int = 1000, held_out_share: float = 0.2,
) -> Task:  # fmt: skip
    """Open a dataset; `held_out_share` of all prompts are never trained on; `reward`: the user's own.

    For "composite", option `datasets` is a list of {"name": ..., "weight": ..., "config": {...}}.
    """
    check_share(held_out_share)
    if num_held_out < 0:
        raise InputError(f"the number of held-out problems must not be negative, and is {num_held_out}")
    options = dict(options or {})
    _check_options(name, options)
    if name == "composite":
        options["datasets"] = _parts(options.get("datasets"))
    task = ReasoningGymTask(name, options=options, seed=seed, num_held_out=num_held_out, held_out_share=held_out_share)
    return judged(task, reward)


def _make_room(kept: dict[Any, Any], most: int) -> None:
    """Forget the oldest."""
    while len(kept) >= most:
        del kept[next(iter(kept))]


def _registered() -> dict[str, Any]:
    try:
        with _settled(0):
            import reasoning_gym  # noqa: PLC0415 - takes seconds
    except ImportError as error:
        raise InputError(f"this task needs reasoning-gym ({error}): pip install 'equilibra[train]'") from error
    found: dict[str, Any] = reasoning_gym.factory.DATASETS
    return found


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    registered = _registered()
    if name not in registered:
        near = [known for known in sorted(registered) if name in known] if name else []
        near = list(dict.fromkeys([*get_close_matches(name, registered, n=5, cutoff=0.5), *near]))[:8]
        hint = f"near it are {', '.join(near)}" if near else f"it has {len(registered)}, like chain_sum or countdown"
        raise InputError(f"reasoning-gym has no dataset {name!r}: {hint}")
    known = [field.name for field in dataclasses.fields(registered[name][1]) if field.name not in OURS]
    for option in options:
        if option in OURS:
            raise InputError(f"{option!r} cannot be an option of {name!r}: the run sets it; remove it")
        if option not in known:
            near = get_close_matches(str(option), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"{name!r} has no option {option!r}: {hint}its options are {', '.join(known) or 'none'}")
    if name in READS_CLOCK:
        raise InputError(
            f"{name!r} cannot be a task: its problems change with the clock, so ranks would not agree on them"
        )
    if name in ORDER_OF_SETS and sys.flags.hash_randomization:
        raise InputError(
            f"problems of {name!r} depend on Python's hash seed, and so would differ between ranks: "
            "start with PYTHONHASHSEED=0 in the environment"
        )


def _parts(datasets: object) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec  # noqa: PLC0415 - takes seconds

    if not isinstance(datasets, list | tuple) or not datasets:
        raise InputError(
            "'composite' needs the option datasets: a list like [{name: chain_sum, weight: 1, config: {}}]"
        )
    specs = []
    for part in datasets:
        if not isinstance(part, Mapping) or "name" not in part or not part.keys() <= {"name", "weight", "config"}:
            raise InputError(f"a dataset of 'composite' has name, weight and config, and this is {part!r:.80}")
        config = part.get("config", {})
        if part["name"] == "composite" or not isinstance(config, Mapping):
            raise InputError(
                f"a dataset of 'composite' is a plain one with a table as config, and this is {part!r:.80}"
            )
        _check_options(part["name"], config)
        specs.append(DatasetSpec(name=part["name"], weight=part.get("weight", 1.0), config=dict(config)))
    return specs


def _create(name: str, options: dict[str, Any]) -> Any:  # noqa: ANN401 - the library has no types
    dataset_class, config_class = _registered()[name]
    try:
        with _settled(options["seed"]):
            return dataset_class(config=config_class(**options))
    except Exception as error:
        given = {key: value for key, value in options.items() if key not in OURS}
        raise InputError(f"cannot make the dataset {name!r} with options {given}: {error!r}; mend them") from error


def _text(entry: Mapping[str, Any]) -> str:
    return "" if entry["answer"] is None else str(entry["answer"])


def _derived_seed(*names: object) -> int:
    """31 bits: some datasets add an index to it and hand it to numpy, which takes 32."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4], "big") >> 1


@contextmanager
def _settled(seed: int) -> Iterator[None]:
    """Nothing global goes in or comes out: random numbers are seeded and put back, warnings and prints dropped."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - the library draws from it
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the library draws from it
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 - the library draws from it


def _is_harmless(answer: str, *, functions: frozenset[str] | tuple[()]) -> bool:
    """Whether evaluating it as Python calls nothing unknown, reads no attributes, and ends soon."""
    if len(answer) > 1000 or "__" in answer or re.search(r"[^\w\s+\-*/().,\[\]'\"|^]", answer, re.ASCII):
        return False
    calls = re.findall(r"([\w)\]'\"]+)\s*\(", answer)
    has_attributes = re.search(r"\.\s*[A-Za-z_]", answer)
    repeats = "*" in answer and re.search(r"['\"\[]", answer)  # [0] * 999999999
    small_power = r"\*\*\s*(?:-?[0-9]{1,2}(?![0-9.])|[A-Za-z]\b|\(-?[0-9]{1,2}(?:/[0-9]{1,2})?\))(?!\s*\*\*)"
    large_powers = "**" in re.sub(small_power, "", answer) or len(re.findall(r"\)\s*\*\*", answer)) > 2
    large_numbers = re.search(r"[0-9.][eE]\+?[0-9]{3}", answer)
    return set(calls) <= set(functions) and not any((has_attributes, repeats, large_powers, large_numbers))
