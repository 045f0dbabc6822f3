"""The page is one file that needs nothing: parsed, and opened in a headless Chromium where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import runs

pytest.importorskip("matplotlib", reason="the page's plots need matplotlib (pip install 'mla_suite[bench]')")

from mla_suite.bench import page, record  # after the check for matplotlib
from mla_suite.bench.record import Report, Result

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Every tag closed in order, ids, attributes and the text of the SVGs."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._keep(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._keep(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "svg" in self.open and data.strip():
            self.texts.append(data.strip())

    def _keep(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value or "")


@cache
def full_page() -> str:
    old = runs.report(0, backends=("native", "triton", "flash_mla"))
    new = runs.report(1, slowdown=1.08, backends=("native", "triton", "flash_mla"))
    new.results.append(
        Result("decode", "b9<script>", "native", {}, 1, 1, failure="off by <b>nan</b> & more", wrong=True)
    )
    new.environment["device"] = 'GPU "<x>" & co'
    old.environment["device"] = new.environment["device"]
    return page.html(new, record.compare(old, new), old)


def test_a_shape_that_is_timed_no_more_is_no_good_verdict() -> None:
    old, new = runs.report(0), runs.report(1)
    assert '"verdict good">none slower</span>' in "".join(page._verdict(record.compare(old, new), old, new))
    new.results[0].rounds, new.results[0].failure = [], "off"
    said = "".join(page._verdict(record.compare(old, new), old, new))
    assert '"verdict bad">none slower, 1 not timed any more,</span>' in said


@cache
def cpu_page() -> str:
    report = runs.report(3, backends=("reference",))
    report.floors = None
    report.environment |= {"arch": "cpu", "device": "x86_64", "driver": "", "cuda": ""}
    report.results.append(
        Result("combine", "b4-r16", "native on gfx942, emulated", {}, 1, 1, checked="reference",
               counted={"memory": 10.0, "matrix": 0.0, "vector": 30.0, "LDS at 128 B": 5.0, "LDS at 256 B": 4.0})
    )  # fmt: skip
    return page.html(report)


@pytest.fixture(scope="module", params=[full_page, cpu_page], ids=["on a GPU", "on a CPU"])
def text(request: pytest.FixtureRequest) -> str:
    made: str = request.param()
    return made


def test_the_page_is_well_formed_and_fetches_nothing(text: str) -> None:
    read = Reader(text)
    assert read.open == []
    assert len(set(read.ids)) == len(read.ids)
    assert not {"script", "iframe", "img", "object"} & set(read.tags)
    for tag, name, value in read.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value.startswith(("#", "data:")), (tag, value)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_what_svgs_refer_to_is_in_the_page(text: str) -> None:
    ids = set(Reader(text).ids)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert used
    assert used <= ids


def test_every_plot_has_labelled_axes_with_units(text: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", text, flags=re.S)
    assert len(figures) >= 4
    for figure in figures:
        words = Reader(figure).texts
        labels = [word for word in words if re.search(r"\((µs|TFLOP/s|FLOP per byte|keys per|1 = equal|a bound)", word)]
        assert len(labels) + ("kernel and shape" in words) == 2, words


def test_text_from_outside_is_escaped() -> None:
    made = full_page()
    assert "b9<script>" not in made
    assert "b9&lt;script&gt;" in made
    assert "GPU &quot;&lt;x&gt;&quot; &amp; co" in made


def test_the_page_says_what_it_shows() -> None:
    on_gpu, on_cpu = full_page(), cpu_page()
    assert "Device time per call by CUDA graph replay with cold caches" in on_gpu
    assert 'class="verdict bad"' in on_gpu
    assert "flash_mla us" in on_gpu
    assert "never times" in on_cpu
    assert "clocks per compute unit, work spread evenly; not times" in on_cpu
    assert "print" in on_cpu


def test_a_run_without_times_is_a_page_too() -> None:
    report = Report(dict(runs.GPU), "bench", ["quick"], [Result("decode", "b1", "native", {}, 1, 1, failure="none")])
    read = Reader(page.html(report))
    assert read.open == []


def browser() -> str:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip("no Chromium on this machine; the page is then only parsed (apt-get install chromium)")
    return found


def opened(path: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=2000", *options,
        path.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)


def console(run: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in run.stderr.splitlines() if ":CONSOLE" in line]


def test_a_browser_shows_it_without_console_errors(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(full_page(), encoding="utf-8")
    run = opened(path, tmp_path / "profile", "--dump-dom")
    assert console(run) == []
    assert run.stdout.count("<svg") == full_page().count("<svg")
    assert "achieved rate (TFLOP/s)" in run.stdout


MEASURE = """<script>
const seen = [...document.querySelectorAll("figure")].map(figure => {
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const texts = [...figure.querySelectorAll("svg text")].map(text => [text.textContent.trim(), box(text)]);
  return [figure.id, box(figure.querySelector("svg")), texts];
});
document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
</script>"""


@pytest.mark.parametrize("made", [full_page, cpu_page], ids=["on a GPU", "on a CPU"])
def test_every_plot_is_seen_with_its_labels(made: Callable[[], str], tmp_path: Path) -> None:
    """Laid out by the browser: no text of a plot is clipped or drawn over another, and both axes say what they are."""
    path = tmp_path / "page.html"
    path.write_text(made().replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    run = opened(path, tmp_path / "profile", "--dump-dom", "--window-size=1400,1000")
    figures = json.loads(unescape(run.stdout.partition('<pre id="seen">')[2].partition("</pre>")[0]))
    assert len(figures) == made().count("<figure ")
    for name, (left, top, right, bottom), texts in figures:
        assert right - left > 400, name
        assert bottom - top > 200, name
        assert sum("(" in text or text == "kernel and shape" for text, _ in texts) >= 2, name
        for index, (text, box) in enumerate(texts):
            assert box[0] >= left - 1, (name, text)
            assert box[1] >= top - 1, (name, text)
            assert box[2] <= right + 1, (name, text)
            assert box[3] <= bottom + 1, (name, text)
            for other, at in texts[:index]:
                wide, high = min(box[2], at[2]) - max(box[0], at[0]), min(box[3], at[3]) - max(box[1], at[1])
                # boxes of lines have a little air above and below their letters
                assert wide <= 1 or high <= 2.5, (name, text, other)


def test_the_console_would_be_heard(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!DOCTYPE html><title>x</title><script>console.error('planted')</script>", encoding="utf-8")
    assert any("planted" in line for line in console(opened(path, tmp_path / "profile", "--dump-dom")))


def test_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(cpu_page(), encoding="utf-8")
    opened(path, tmp_path / "profile", f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
