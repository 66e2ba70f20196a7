"""The picture of a training run for the README: the opening and the charts of its report, 1280 px wide, light.

python -m tests.browser.picture RUN/report.html docs/images/training.png
"""

import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from tests.browser.conftest import ARGUMENTS, CHROMIUM

COLOURS = 256


def picture(report: Path) -> bytes:
    """From the headline to the last chart, as PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        top = page.locator("#subject").bounding_box()
        end = page.locator("#training-pick").bounding_box()
        clip = {"x": 0, "y": top["y"] - 28, "width": 1280, "height": end["y"] - top["y"] + 20}
        shot = page.screenshot(clip=clip, full_page=True)
        browser.close()
    small = BytesIO()
    Image.open(BytesIO(shot)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(picture(Path(sys.argv[1])))
