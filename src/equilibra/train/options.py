"""What `equilibra train --options` prints: every option with its default, explained by the docstring under its field.

The text is a configuration file: written to one and changed, it can be given to `equilibra train --config`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields
from functools import cache
from itertools import pairwise

from equilibra.train.config import TrainConfig
from equilibra.train.config_files import table_of, toml_line

__all__ = ["option_docs", "options_text"]

COLUMN = 38
"""where explanations begin"""
WIDTH = 120


@cache
def option_docs() -> dict[str, str]:
    """The explanation of every option, `section.key`, from the docstrings in the source."""
    return {
        f"{section}.{key}": doc
        for section, values in vars(TrainConfig()).items() for key, doc in _docs_of(type(values)).items()
    }  # fmt: skip


def _docs_of(section: type) -> dict[str, str]:
    """Fields of a section, also those it shares with others, and what is said of each."""
    docs: dict[str, str] = {}
    for kind in section.__mro__[:-1]:
        (node,) = ast.parse(inspect.getsource(kind)).body
        docs = (_field_docs(node) if isinstance(node, ast.ClassDef) else {}) | docs
    return {one.name: docs[one.name] for one in fields(section)}


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    """Fields of a class and the strings under them."""
    docs = {}
    for one, after in pairwise(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
            docs[one.target.id] = inspect.cleandoc(str(ast.literal_eval(after.value)))
    return docs


def options_text(config: TrainConfig | None = None) -> str:
    """Every option with its value (its default), explained."""
    config = config or TrainConfig()
    docs, lines = option_docs(), ["# equilibra train: every option; change one with section.key=value, or in a file"]
    for section, values in table_of(config).items():
        about = type(getattr(config, section)).__doc__ or ""
        lines += ["", f"# {about.splitlines()[0]}", f"[{section}]"]
        for key, value in values.items():
            lines += _explained(toml_line(key, value), docs[f"{section}.{key}"])
    return "\n".join(lines) + "\n"


def _explained(line: str, doc: str) -> list[str]:
    """The line, with its explanation as a comment beside it."""
    first, *more = textwrap.wrap(" ".join(doc.split()), WIDTH - COLUMN - 2)
    return [f"{line:<{COLUMN}}# {first}", *(f"{'':<{COLUMN}}# {part}" for part in more)]
