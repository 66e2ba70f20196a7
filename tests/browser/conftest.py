"""Reports in a headless Chromium. Where there is none the tests are skipped and say so."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.references.runs import make_run

from equilibra.events.run import Run
from equilibra.report.page import write_report

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass
class Opened:
    """A report in a tab, with everything that went wrong in it."""

    page: Page
    path: Path
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def ready(self) -> str:
        return self.page.evaluate("document.documentElement.dataset.ready")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def choose(self, selector: str, value: object) -> None:
        self.page.select_option(selector, str(value))
        self.settle()

    def settle(self) -> None:
        """Let what a choice started come to its end: arrays unpack in tasks of their own."""
        self.page.evaluate(
            "new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done, 0)), 0))"
        )

    def wait(self, expression: str) -> None:
        """Until an expression holds; the policy of the page forbids Playwright's own way, which needs eval."""
        for _ in range(200):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(25)
        pytest.fail(f"this never came true: {expression}")

    def table(self, selector: str, number: int = 0) -> list[list[str | None]]:
        """Raw values (data-value) of a table's body, row by row."""
        return self.page.evaluate(
            """([selector, number]) => [...document.querySelectorAll(`${selector} table`)[number].tBodies[0].rows]
                .map((row) => [...row.cells].map((cell) => cell.dataset.value ?? null))""",
            [selector, number],
        )

    def unfold(self, selector: str) -> None:
        """Open the table behind a chart."""
        self.page.evaluate("(s) => { document.querySelector(`${s} details`).open = true; }", selector)
        self.page.wait_for_selector(f"{selector} table")

    def heads(self, selector: str) -> list[str]:
        return self.page.evaluate(
            "(s) => [...document.querySelectorAll(`${s} thead th`)].map((c) => c.innerText)", selector
        )


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.is_file():
        pytest.skip(f"there is no {CHROMIUM}; `make test` installs it where it can")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def small() -> Run:
    return make_run()


@pytest.fixture(scope="module")
def show(browser, tmp_path_factory) -> Iterator[Callable[..., Opened]]:
    """Write the report of a run and open it from the disk."""
    contexts = []

    def open_report(run: Run, *, scheme: str = "light", width: int = 1280, before: str = "") -> Opened:
        path = tmp_path_factory.mktemp("report") / "report.html"
        write_report(run, path)
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        opened = Opened(page=contexts[-1].new_page(), path=path)
        opened.page.on("console", lambda message: opened.problems.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.problems.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        if before:
            opened.page.add_init_script(before)
        opened.page.goto(path.as_uri())
        opened.page.wait_for_selector("html[data-ready]", timeout=60_000)
        return opened

    yield open_report
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def opened(show, small) -> Opened:
    """The small run, open once for all tests of a file that choose what they look at."""
    return show(small)
