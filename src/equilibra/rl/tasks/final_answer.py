r"""Whether two answers end in the same result, as GSM8K and MATH write it.

The result is what stands behind the last "####", or else in the last \boxed{...}. Where an expected answer has
neither, it is the result as a whole; where a given one has neither, its last number counts. A number is compared as a
number (1,234.50 = $1234.5 = 2469/2), anything else as text.
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["final_answer", "same_final_answer"]

MARK, BOX = "####", r"\boxed{"
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?!\w))?|\.[0-9]+"
NUMBER = re.compile(rf"(?<!\w)(?P<sign>(?<![)\]])[-+]\$?|\$-?)?(?P<over>{UNSIGNED})(?: ?/ ?(?P<under>[0-9]+))?%?")


def final_answer(text: str) -> str | None:
    r"""What stands behind the last "####" or in the last \boxed{...}; None if there is neither."""
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
    """Whether a given answer has the result of the expected one."""
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
    """The number, or None for one over zero and for those too long to be meant."""
    try:
        size = Fraction(match["over"].replace(",", "")) / Fraction(match["under"] or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return -size if "-" in (match["sign"] or "") else size
