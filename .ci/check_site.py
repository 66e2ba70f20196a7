"""Checks that a built site loads nothing from another server: `check_site.py FOLDER`.

Links that a reader may follow are allowed; scripts, styles, fonts, images and frames must be in the folder. Material's own
script would load mermaid from a server, so a page must not contain a mermaid diagram either.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}


class Loads(HTMLParser):
    """Collects what a page loads, and whether it has a mermaid diagram."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.has_mermaid = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.has_mermaid |= "mermaid" in (values.get("class") or "").split()
        if tag in LOADED and values.get(LOADED[tag]):
            self.addresses.append(str(values[LOADED[tag]]))


def complaints(page: Path, site: Path) -> list[str]:
    """What is wrong with one page."""
    loads = Loads()
    loads.feed(page.read_text())
    found = ["has a mermaid diagram, which Material loads from a server"] if loads.has_mermaid else []
    for address in loads.addresses:
        parts = urlsplit(address)
        if parts.scheme == "data":
            continue
        if parts.scheme or parts.netloc:
            found.append(f"loads {address}")
        elif page.name != "404.html" and not (page.parent / unquote(parts.path)).exists():
            found.append(f"loads {address}, which is not in the site")
    return [f"{page.relative_to(site)} {one}" for one in found]


def main(folder: str) -> int:
    """Check every page and style sheet; the exit status."""
    site = Path(folder)
    pages = sorted(site.rglob("*.html"))
    found = [one for page in pages for one in complaints(page, site)]
    for style in site.rglob("*.css"):
        if "url(http" in style.read_text() or "url(//" in style.read_text():
            found.append(f"{style.relative_to(site)} loads from another server")
    print("\n".join(found) or f"{len(pages)} pages in {folder}, links checked, nothing loaded from elsewhere")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
