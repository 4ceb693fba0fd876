"""A report in a real browser: light and dark, on a desk and on a phone.

DORA_REPORT names a report to look at instead of a made-up run's; DORA_SCREENSHOTS a directory for
the pictures (docs/images is refreshed with both).
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora.consumers.report.page import render
from tests.browser import Page, browser_page, find_browser
from tests.report_runs import MadeUpRun, clean_audit

SIZES = {"light": (1280, 1180), "dark": (1280, 1180), "phone": (390, 1300)}
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
CHARTS = """[...document.querySelectorAll('figure svg')].map(
  each => Math.min(each.getBoundingClientRect().width, each.getBoundingClientRect().height))"""
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('figure svg text')]
  .filter(each => each.textContent.trim())
  .map(each => each.getBoundingClientRect().height))"""
OUTSIDE = """[...document.querySelectorAll('figure svg text')].filter(each => {
  const text = each.getBoundingClientRect(), box = each.ownerSVGElement.getBoundingClientRect();
  return text.left < box.left - 2 || text.right > box.right + 2 || text.bottom > box.bottom + 2;
}).map(each => each.textContent)"""
UNPAINTED = """[...document.querySelectorAll('figure svg *')].filter(
  each => /#01f/.test(each.getAttribute('style') || '')).length"""
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(value => {
      const c = value / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = each => { for (; each; each = each.parentElement) {
    const colour = getComputedStyle(each).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour; } };
  const ratio = each => { const style = getComputedStyle(each);
    const front = each.ownerSVGElement ? style.fill : style.color;
    const [a, b] = [light(front), light(back(each))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); };
  return Math.min(...[...document.querySelectorAll(
    'h1, h2, h3, p, a, td, th, dt, dd, code, summary, .badge, figure svg text')]
    .filter(each => each.textContent.trim()).map(ratio)); })()"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("DORA_REPORT")
    if given:
        return Path(given)
    made = MadeUpRun(name="spell-backward", steps=24, groups=6, size=8, workers=6).report()
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render([replace(made, audit=clean_audit(made))]))
    return path


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Page]:
    with browser_page(find_browser()) as found:
        found.view(width=1280, height=1180)
        found.open(report)
        yield found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("DORA_SCREENSHOTS")
    return Path(given) if given else tmp_path_factory.mktemp("screenshots")


@pytest.mark.parametrize("look", SIZES)
def test_a_report_fits_its_window_and_can_be_read(page: Page, pictures: Path, look: str) -> None:
    width, height = SIZES[look]
    page.view(width=width, height=height, dark=look == "dark")
    assert page.evaluate("innerWidth") == width
    assert page.evaluate(OVERFLOW) <= 0
    sizes = page.evaluate(CHARTS)
    assert len(sizes) >= 10 and min(sizes) > 90
    assert page.evaluate(SMALLEST_TEXT) > (9 if look == "phone" else 11)
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(UNPAINTED) == 0
    assert page.evaluate(CONTRAST) >= 4.5
    picture = pictures / f"report-{look}.png"
    page.screenshot(picture)
    assert 10_000 < picture.stat().st_size < 300_000


def test_light_and_dark_have_colours_of_their_own(page: Page) -> None:
    colours = []
    for dark in (False, True):
        page.view(width=1280, height=1180, dark=dark)
        stroke = "getComputedStyle(document.querySelector('figure svg text')).fill"
        colours.append((page.evaluate(BACKGROUND), page.evaluate(stroke)))
    assert colours[0][0] != colours[1][0]
    assert colours[0][1] != colours[1][1]


def test_a_report_asks_the_network_for_nothing_and_has_no_errors(page: Page, report: Path) -> None:
    page.evaluate("document.body.offsetHeight")
    assert [each for each in page.requests if not each.startswith("data:")] == [
        report.absolute().as_uri()
    ]
    assert page.problems == []
