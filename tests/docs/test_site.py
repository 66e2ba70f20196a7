"""The documentation site: `make docs` builds it strictly; here are its controls, which need no generator."""

import hashlib
import re
import subprocess
import sys

import pytest
from tests.conftest import REPOSITORY

CHECK = REPOSITORY / ".ci" / "check_site.py"
SHIM = REPOSITORY / "docs" / "assets" / "iframe-worker.js"


def checked(folder) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(CHECK), str(folder)], capture_output=True, text=True, check=False)


def test_a_page_that_loads_only_its_own_files_passes(tmp_path):
    (tmp_path / "own.js").write_text("")
    (tmp_path / "index.html").write_text('<script src="own.js"></script><a href="https://arxiv.org">a link</a>')
    assert checked(tmp_path).returncode == 0


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://unpkg.com/shim.js"></script>',
        '<link rel="stylesheet" href="//fonts.googleapis.com/css">',
        '<img src="https://example.org/a.png">',
        '<img src="missing.png">',
        '<pre class="mermaid">graph</pre>',
    ],
)
def test_a_page_that_needs_a_server_is_refused(page, tmp_path):
    (tmp_path / "index.html").write_text(page)
    done = checked(tmp_path)
    assert done.returncode == 1
    assert "index.html" in done.stdout


def test_a_style_sheet_that_loads_a_font_is_refused(tmp_path):
    (tmp_path / "index.html").write_text("")
    (tmp_path / "a.css").write_text("@font-face{src:url(https://fonts.gstatic.com/a.woff2)}")
    assert checked(tmp_path).returncode == 1


def test_an_empty_site_is_refused(tmp_path):
    assert checked(tmp_path).returncode == 1


def test_the_build_of_make_refuses_a_broken_link(tmp_path):
    """With --quiet, say, mkdocs does not count warnings and its strict mode accepts everything."""
    pytest.importorskip("mkdocs", reason="`make docs` installs mkdocs")
    pytest.importorskip("material", reason="`make docs` installs mkdocs-material")
    makefile = (REPOSITORY / "Makefile").read_text()
    options = re.search(r"mkdocs (build.*)", makefile)[1].split()
    (tmp_path / "mkdocs.yml").write_text("site_name: control\nuse_directory_urls: false\n")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    built = []
    for text in ("[gone](gone.md)", "[here](index.md)"):
        page.write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", *options], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        built.append(done.returncode)
    assert built[0] != 0
    assert built[1] == 0


def test_the_shim_is_the_published_one():
    decision = (REPOSITORY / "docs" / "decisions" / "0013-docs-site.md").read_text()
    assert hashlib.sha256(SHIM.read_bytes()).hexdigest() in decision
    assert "https://" not in SHIM.read_text()


def test_pages_are_wrapped_at_one_width():
    """Tables, code, pictures and links may be longer; nobody can wrap them."""
    wide = []
    for page in sorted([*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")]):
        in_code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            in_code ^= line.lstrip().startswith("```")
            if len(line) > 120 and not in_code and not line.startswith(("|", "![")) and " " in line[60:].strip():
                wide.append(f"{page.relative_to(REPOSITORY)}:{number} has {len(line)} characters")
    assert not wide, "\n".join(wide)
