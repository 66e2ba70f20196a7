"""Problems from reasoning-gym: any of its datasets, by name, with its options.

An entry of a dataset is generated on access from a seed and an index. Some datasets take time proportional to their
size to open, so problems come from chunks of 500 with a seed per chunk and attempt. A prompt's hash decides whether it
is held out: a training problem with a held-out prompt is replaced by the next attempt, held-out problems are the first
distinct ones of their own stream. So no prompt is on both sides, and no list of prompts is kept.

The library is made deterministic: global generators are seeded during each call, warnings and prints suppressed, and
datasets that depend on the order of sets need PYTHONHASHSEED=0. Some scorers evaluate the answer as Python code: only
arithmetic and plain lists reach them. codeio is refused: its generators read the clock.
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
from functools import lru_cache
from typing import Any

import numpy as np

from equilibra.core import checks
from equilibra.core.errors import InputError
from equilibra.rl.tasks import Problem, check_number, hash_of_prompt

__all__ = ["ReasoningGymTask", "dataset_names", "reasoning_gym_task"]

CHUNK = 500
CHUNKS_KEPT, PROBLEMS_KEPT = 8, 4096
TRIES = 100
OURS = frozenset({"seed", "size"})
ORDER_OF_SETS = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""datasets whose entries depend on Python's hash seed"""
READS_CLOCK = frozenset({"codeio"})
"""datasets whose entries depend on the clock"""
RUN_AS_CODE = frozenset(
    {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
     "simple_integration", "spiral_matrix", "string_insertion"}
)  # fmt: skip
"""datasets whose scorers evaluate the answer as code"""
FUNCTIONS = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", "ln", "sqrt", "Abs", "abs"})
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def dataset_names() -> list[str]:
    """Names of all datasets."""
    return sorted(_registered())


class ReasoningGymTask:
    """A task with the problems of one dataset; made by `reasoning_gym_task`."""

    def __init__(
        self, name: str, *, options: Mapping[str, Any], seed: int, num_held_out: int, held_out_share: float
    ) -> None:
        self.name = f"reasoning-gym/{name}"
        self.num_held_out = num_held_out
        """how many held-out problems may be asked for; `held_out` fails if the dataset has fewer"""
        self._dataset_name, self._options, self._seed, self._share = name, dict(options), seed, held_out_share
        self._chunks: dict[tuple[object, ...], Any] = {}
        self._training = lru_cache(PROBLEMS_KEPT)(self._trained)  # every answer of a group asks for its problem
        self._kept_out: list[Problem] = []
        self._tried = 0
        self._scorer = self._chunk("train", 0, 0)

    def problem(self, number: int) -> Problem:
        check_number(self.name, number)
        return self._training(number)

    def _trained(self, number: int) -> Problem:
        failed = ""
        for attempt in range(TRIES):
            problem, failed = self._candidate("train", attempt, number)
            if problem is not None and not self._is_held_out(problem):
                return problem
        raise InputError(
            f"{self.name} gave no training problem {number} in {TRIES} tries: {failed or 'all were held-out ones'}; "
            f"choose options with more distinct problems than {self._options}"
        )

    def held_out(self, number: int) -> Problem:
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
                f"{self.name} gave {len(self._kept_out)} distinct held-out problems in {self._tried} tries, but "
                f"{number + 1} were asked for{': ' * bool(failed)}{failed}; ask for fewer, or choose options "
                f"with more distinct problems than {self._options}"
            )
        return self._kept_out[number]

    def reward(self, problem: Problem, answer_text: str) -> float:
        """The dataset's own score of the text in <answer> tags, or of the whole text; 0 if scoring fails."""
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
        """A problem, held out or not, or the reason why generating it failed."""
        chunk, place = divmod(number, CHUNK)
        try:
            with _settled(_derived_seed(self._seed, stream, attempt, number)):
                entry = self._chunk(stream, attempt, chunk)[place]
                answer = "" if entry["answer"] is None else str(entry["answer"])
                problem = Problem(number=number, prompt=str(entry["question"]), answer=answer, metadata=entry)
                problem.prompt.encode()  # a lone surrogate cannot be encoded
        except Exception as error:  # noqa: BLE001 - generators raise anything when they find no problem
            self._chunks.pop((stream, attempt, chunk), None)  # a failed chunk may be inconsistent
            return None, f"{type(error).__name__}: {error}"
        return problem, ""

    def _chunk(self, stream: str, attempt: int, chunk: int) -> Any:  # noqa: ANN401 - the library has no types
        key = (stream, attempt, chunk)
        if key not in self._chunks:
            while len(self._chunks) >= CHUNKS_KEPT:
                del self._chunks[next(iter(self._chunks))]  # the oldest
            seed = _derived_seed(self._seed, *key)
            self._chunks[key] = _create(self._dataset_name, {**self._options, "seed": seed, "size": CHUNK})
        return self._chunks[key]


def reasoning_gym_task(
    name: str, options: Mapping[str, Any] | None = None, *, seed: int = 0, num_held_out: int = 1000,
    held_out_share: float = 0.2,
) -> ReasoningGymTask:  # fmt: skip
    """A task with the problems of one dataset. held_out_share: share of prompts that are never trained on.

    The dataset "composite" takes the option `datasets`, a list of {"name": ..., "weight": ..., "config": {...}}.
    """
    checks.check_number("the share of held-out problems", held_out_share, above=0, high=1, below=True)
    checks.check_whole("num_held_out", num_held_out, low=0)
    options = dict(options or {})
    _check_options(name, options)
    if name == "composite":
        options["datasets"] = _parts(options.get("datasets"))
    return ReasoningGymTask(name, options=options, seed=seed, num_held_out=num_held_out, held_out_share=held_out_share)


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
        hint = f"similar names are {', '.join(near)}" if near else f"it has {len(registered)}, such as chain_sum"
        raise InputError(f"reasoning-gym has no dataset {name!r}: {hint}")
    known = [field.name for field in dataclasses.fields(registered[name][1]) if field.name not in OURS]
    for option in options:
        if option in OURS:
            raise InputError(f"{option!r} cannot be an option of {name!r}: the run decides it; remove it")
        if option not in known:
            near = get_close_matches(str(option), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"{name!r} has no option {option!r}: {hint}its options are {', '.join(known) or 'none'}")
    if name in READS_CLOCK:
        raise InputError(f"{name!r} cannot be a task: its problems change with the clock, so ranks would disagree")
    if name in ORDER_OF_SETS and sys.flags.hash_randomization:
        raise InputError(
            f"problems of {name!r} depend on Python's hash seed and would differ between ranks: set PYTHONHASHSEED=0"
        )


def _parts(datasets: object) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec  # noqa: PLC0415 - takes seconds

    if not isinstance(datasets, list | tuple) or not datasets:
        raise InputError("'composite' needs the option datasets, such as [{name: chain_sum, weight: 1, config: {}}]")
    specs = []
    for part in datasets:
        if not isinstance(part, Mapping) or "name" not in part or not part.keys() <= {"name", "weight", "config"}:
            raise InputError(f"a dataset of 'composite' has a name, weight and config, but this is {part!r:.80}")
        config = part.get("config", {})
        if part["name"] == "composite" or not isinstance(config, Mapping):
            raise InputError(f"parts of 'composite' must not be composite, with a table as config, not {part!r:.80}")
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
        raise InputError(f"cannot make the dataset {name!r} with options {given}: {error!r}; correct them") from error


def _derived_seed(*names: object) -> int:
    """A seed of 31 bits: some datasets add an index to it and pass it to numpy, which takes 32."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4], "big") >> 1


@contextmanager
def _settled(seed: int) -> Iterator[None]:
    """Seed the global generators and restore them afterwards; suppress warnings and prints."""
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
    """Whether evaluating the answer as Python calls only `functions`, reads no attributes, and ends soon."""
    if len(answer) > 1000 or "__" in answer or re.search(r"[^\w\s+\-*/().,\[\]'\"|^]", answer, re.ASCII):
        return False
    calls = re.findall(r"([\w)\]'\"]+)\s*\(", answer)
    has_attributes = re.search(r"\.\s*[A-Za-z_]", answer)
    repeats = "*" in answer and re.search(r"['\"\[]", answer)  # [0] * 999999999
    small_power = r"\*\*\s*(?:-?[0-9]{1,2}(?![0-9.])|[A-Za-z]\b|\(-?[0-9]{1,2}(?:/[0-9]{1,2})?\))(?!\s*\*\*)"
    large_powers = "**" in re.sub(small_power, "", answer) or len(re.findall(r"\)\s*\*\*", answer)) > 2
    large_numbers = re.search(r"[0-9.][eE]\+?[0-9]{3}", answer)
    return set(calls) <= set(functions) and not any((has_attributes, repeats, large_powers, large_numbers))
