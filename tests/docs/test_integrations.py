"""The table of integrations says what is so: versions, code, pages and tests."""

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import REPOSITORY

PAGES = REPOSITORY / "docs" / "integrations"
CODE = REPOSITORY / "src" / "equilibra" / "integrations"
COLUMNS = [
    "framework", "version", "routing to recordings", "planned training", "rollout engine", "tested with", "on GPUs",
    "tests",
]  # fmt: skip
FOLDERS = {"transformers": "hf", "megatron-core": "megatron", "nemo-rl": "nemo_rl"}
"""where the code of a framework is, if not under its name"""
PACKAGE = "the package"
CPU_BUILD = "its CPU build"
TESTED = (PACKAGE, CPU_BUILD, "a stand-in", "objects of its format")
SECTIONS = ("Verify", "Switch off", "Not supported|Refused")
MOST_ADDED = 10


@dataclass(frozen=True)
class Row:
    framework: str
    page: str
    cells: dict[str, str]

    @property
    def package(self) -> str:
        return self.framework.lower()

    @property
    def code(self) -> Path:
        return CODE / FOLDERS.get(self.package, self.package)

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.cells["tests"])


def read_table() -> list[Row]:
    lines = [line for line in (PAGES / "README.md").read_text().splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert head == COLUMNS
    rows = []
    for cells in body:
        assert len(cells) == len(COLUMNS), cells
        link = re.fullmatch(r"\[(.+)\]\((.+\.md)\)", cells[0])
        assert link, f"{cells[0]} must be a link to the framework's page"
        rows.append(Row(link[1], link[2], dict(zip(COLUMNS, cells, strict=True))))
    return rows


ROWS = read_table()
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.framework)


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def test_every_page_is_in_the_table():
    assert sorted(row.page for row in ROWS) == sorted(p.name for p in PAGES.glob("*.md") if p.name != "README.md")


@each_row
def test_versions_are_those_that_tests_run_with(row):
    pinned = pins().get(row.package)
    versions = row.cells["version"].split(", ")
    assert not pinned or pinned in versions
    if len(versions) > 1:  # `make test-megatron` runs all of them
        assert (
            f"{row.package.split('-')[0].upper()}S := {' '.join(versions)}\n" in (REPOSITORY / "Makefile").read_text()
        )
    if row.cells["tested with"].startswith(PACKAGE):
        assert pinned, f"{row.package} is not in constraints.txt: the tests cannot have run it"
        try:
            installed = importlib.metadata.version(row.package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{row.package} is not installed")
        assert installed == pinned
    stacks = REPOSITORY / "tests" / "stacks" / "requirements.txt"
    if row.cells["tested with"].startswith(CPU_BUILD) and stacks.is_file():
        assert f"{row.package}-cpu=={row.cells['version']}" in stacks.read_text().splitlines()


@each_row
def test_words_are_those_that_the_page_explains(row):
    assert row.cells["tested with"].startswith(TESTED)
    assert re.fullmatch(r"\d[\d.\-]*(, \d[\d.\-]*)*", row.cells["version"])
    for column in COLUMNS[2:5]:
        assert row.cells[column] in {"yes", "–"}
    assert row.cells["on GPUs"] in {"yes", "never"}


@each_row
def test_what_works_is_in_the_code(row):
    files = list(row.code.glob("*.py")) or [row.code.with_suffix(".py")]
    converts = any("def sequences_of_" in file.read_text() for file in files)
    assert (row.cells["routing to recordings"] == "yes") == converts
    engine = re.compile(r"def generate|\(ServedEngine\)")
    generates = any(engine.search(file.read_text()) for file in row.code.glob("engine.py"))
    assert (row.cells["rollout engine"] == "yes") == generates
    if row.cells["planned training"] == "yes":
        balances = re.compile(r"\bBalancer\b|\bbalance\(|\bplanned execution\b")
        assert any(balances.search(file.read_text()) for file in row.code.rglob("*.py"))


@each_row
def test_named_tests_are_of_the_framework(row):
    assert row.tests
    name = re.compile(re.escape(row.package).replace(r"\-", "[-_ ]?"), re.IGNORECASE)
    short = re.compile(row.package.partition("-")[0], re.IGNORECASE)
    for file in row.tests:
        path = REPOSITORY / file
        assert path.is_file(), f"{file} is gone"
        text = path.read_text()
        assert "def test_" in text
        assert name.search(text) or short.search(text), f"{file} does not mention {row.framework}"


def diffs(page: str) -> list[list[str]]:
    """Lines that each diff of a page adds."""
    blocks = re.findall(r"```diff\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    return [[line for line in block.splitlines() if line.startswith("+")] for block in blocks]


@each_row
def test_pages_say_what_must_be_said(row):
    text = (PAGES / row.page).read_text()
    for section in SECTIONS:
        said = re.search(rf"^(#+ |\*\*|.*\. \*\*)({section})", text, re.MULTILINE)
        assert said, f"{row.page} does not say: {section}"
    if row.cells["planned training"] == "yes":
        assert re.search("checkpoint", text, re.IGNORECASE), f"{row.page} trains, and says nothing of checkpoints"


@each_row
def test_what_is_to_be_changed_is_short(row):
    assert "```" in (PAGES / row.page).read_text()
    for added in diffs(row.page):
        assert 0 < len(added) <= MOST_ADDED


def test_the_control_finds_a_long_diff(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PAGES", tmp_path)
    (tmp_path / "long.md").write_text("```diff\n" + "+a line\n" * 11 + "```\n")
    assert [len(added) for added in diffs("long.md")] == [11]


def test_links_of_the_readme_lead_somewhere():
    text = (REPOSITORY / "README.md").read_text()
    assert "docs/integrations/README.md" in text
    for row in ROWS:
        assert row.framework in text, f"the README does not name {row.framework}"


def test_options_of_slime_are_documented():
    from equilibra.integrations.slime.hooks import OPTIONS, PREFIX

    table = re.findall(rf"^\| `{PREFIX}(\w+)` \|", (PAGES / "slime.md").read_text(), re.MULTILINE)
    assert table == list(OPTIONS)
