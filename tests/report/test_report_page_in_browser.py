"""The page in a browser: readable on a telephone and on a screen, light and dark, and asking nothing of anybody.

It needs playwright, and a Chromium: its own (``playwright install chromium``), or one that is on the path.
"""

import os
import shutil

import pytest
from support import statistics as made
from support.selection import each_once

from kfconvert.report import fragment, page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
LONG = "a_name_without_an_end" * 30


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch(executable_path=path, args=arguments)
        except playwright.Error as error:
            pytest.skip(f"no Chromium is installed: {str(error).splitlines()[0]}")
        yield found
        found.close()


def long_names() -> dict:
    return made.with_texts(made.statistics(), LONG)


PAGES = {**made.KINDS, "long names": long_names}


class Visit:
    """One page that was opened, with what it has asked for and said."""

    def __init__(self, browser, html, folder, width, scheme):
        file = folder / "report.html"
        file.write_text(html)
        self.said, self.requests = [], []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.address = file.as_uri()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.page.close()

    def ask(self, script):
        return self.page.evaluate(script)


BEYOND_THE_EDGE = """
() => [...document.querySelectorAll('.kfconvert *')].filter(each => {
  const box = each.getBoundingClientRect();
  return box.right > document.documentElement.clientWidth + 1 && !each.closest('.scroll') && !each.closest('.unseen');
}).map(each => each.outerHTML.slice(0, 100))
"""
# The least contrast of a text with what lies behind it, by the formula of WCAG.
CONTRAST = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = color => color.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = each => {
    for (; each; each = each.parentElement) {
      const color = rgba(getComputedStyle(each).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const texts = [...document.querySelectorAll('.kfconvert *')].filter(each =>
    [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim()) && each.tagName !== 'STYLE');
  return Math.min(...texts.map(each => {
    const [a, b] = [light(rgba(getComputedStyle(each).color)), light(behind(each))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
}
"""


@each_once(kind=PAGES, width=[400, 1280], scheme=["light", "light", "dark", "dark"])
def test_it_fits_says_nothing_and_asks_for_nothing(browser, tmp_path, kind, width, scheme):
    with Visit(browser, page(PAGES[kind](), LONG if kind == "long names" else ""), tmp_path, width, scheme) as visit:
        visit.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert visit.ask("document.documentElement.scrollWidth") == width
        assert visit.ask(BEYOND_THE_EDGE) == []
        assert visit.ask(CONTRAST) >= 4.5
        assert visit.said == [] and visit.requests == [visit.address]


def test_within_a_notebook_it_changes_nothing_else(browser, tmp_path):
    around = "<!doctype html><style>table {{ color: rgb(1, 2, 3); }}</style><table><td>mine</table>{}<p id=after>after"
    with Visit(browser, around.format(fragment(made.statistics())), tmp_path, 800, "light") as visit:
        assert visit.ask("getComputedStyle(document.querySelector('td')).color") == "rgb(1, 2, 3)"
        assert visit.ask("getComputedStyle(document.querySelector('#after')).fontFamily") != visit.ask(
            "getComputedStyle(document.querySelector('.kfconvert')).fontFamily"
        )
        assert visit.ask("document.documentElement.scrollWidth") == 800 and visit.said == []
