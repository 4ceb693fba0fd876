"""A report in a real browser: light and dark, on a desk and on a phone.

DORA_REPORT names a report to look at instead of a made-up run's; DORA_SCREENSHOTS a directory for
the pictures (docs/images is refreshed with both).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from dora.consumers.report.page import render
from tests import needs
from tests.report_runs import MadeUpRun, clean_audit

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = (
    "`make test` installs it where it may (ops/test-tools.sh), otherwise: "
    "apt-get install --no-install-recommends chromium"
)
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
def chromium() -> Iterator[Browser]:
    program = needs.program(*BROWSERS, install=INSTALL)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--disable-gpu"])
        yield started
        started.close()


@contextmanager
def opened(chromium: Browser, report: Path, look: str) -> Iterator[Page]:
    """The report as it looks in a new window."""
    width, height = SIZES[look]
    context = chromium.new_context(
        viewport={"width": width, "height": height},
        is_mobile=look == "phone",
        color_scheme="dark" if look == "dark" else "light",
    )
    page = context.new_page()
    page.goto(report.absolute().as_uri())
    yield page
    context.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("DORA_SCREENSHOTS")
    return Path(given) if given else tmp_path_factory.mktemp("screenshots")


@pytest.mark.parametrize("look", SIZES)
def test_a_report_fits_its_window_and_can_be_read(
    chromium: Browser, report: Path, pictures: Path, look: str
) -> None:
    with opened(chromium, report, look) as page:
        assert page.evaluate("innerWidth") == SIZES[look][0]
        assert page.evaluate(OVERFLOW) <= 0
        sizes = page.evaluate(CHARTS)
        assert len(sizes) >= 10 and min(sizes) > 90
        assert page.evaluate(SMALLEST_TEXT) > (9 if look == "phone" else 11)
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(UNPAINTED) == 0
        assert page.evaluate(CONTRAST) >= 4.5
        picture = pictures / f"report-{look}.png"
        page.screenshot(path=picture)
        assert 10_000 < picture.stat().st_size < 300_000


def test_light_and_dark_have_colours_of_their_own(chromium: Browser, report: Path) -> None:
    colours = []
    stroke = "getComputedStyle(document.querySelector('figure svg text')).fill"
    for look in ("light", "dark"):
        with opened(chromium, report, look) as page:
            colours.append((page.evaluate(BACKGROUND), page.evaluate(stroke)))
    assert colours[0][0] != colours[1][0]
    assert colours[0][1] != colours[1][1]


def test_a_report_asks_the_network_for_nothing_and_has_no_errors(
    chromium: Browser, report: Path
) -> None:
    page = chromium.new_page()
    requests: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.goto(report.absolute().as_uri())
    page.evaluate("document.body.offsetHeight")
    wanted = [report.absolute().as_uri()]
    assert [each for each in requests if not each.startswith("data:")] == wanted
    assert problems == []
    page.close()
