"""Phrases of README and the guides as the saved runs, and the tables of PERF.md, give them.

Each function reads one source and returns `Sourced` records: a page, the source that the page has to name beside the
figures, and the phrases with these figures, in the page's own words.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import amd_points
import bench_flashmla
import compare_amd_peers
import fit_amd_time

from mla_suite import batch_invariant_split_size

ROOT = Path(__file__).parent.parent
RUNS = ("h200", "h100", "h100_e4m3")
FLASHMLA, FLASHMLA_H100, FLASHMLA_E4M3 = (f"benchmarks/results/flashmla/{run}.json" for run in RUNS)
REDUCE = "benchmarks/results/reduce/h200.csv"
DECODE = "benchmarks/results/decode_sm90/h200.json"
TRANSFORMERS = "benchmarks/results/transformers/h200.csv"
DECODE_LOG, COMBINE_LOG = "csrc/sm_90/decode/PERF.md", "csrc/sm_90/combine/PERF.md"
README, SERVING, PUBLISHED = "README.md", "docs/serving_engineer.md", "docs/published_work.md"


class Sourced(NamedTuple):
    """Phrases of a page whose figures come from one source, a file of this repository."""

    page: str
    source: str
    phrases: list[str]


def saved(path: str | Path) -> Any:
    """The records of a saved run."""
    text = (ROOT / path).read_text()
    if Path(path).suffix == ".json":
        return json.loads(text)
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def span(values: list[float], digits: int = 2) -> str:
    """The range of some values, as `0.27 to 0.90`."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def section(page: str, heading: str) -> str:
    """The text of a page below one of its headings."""
    return (ROOT / page).read_text().split(f"# {heading}\n")[1].split("\n#")[0]


def log_table(page: str, heading: str, columns: str) -> dict[str, list[list[float]]]:
    """The numbers of each row of the table that begins with these columns: of a cell `a / b` both."""
    body = section(page, heading).split(f"| {columns}")[1].split("\n\n")[0].splitlines()[2:]
    found = {}
    for line in body:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)] for cell in cells]
    return found


def headline() -> Iterator[Sourced]:
    rows = saved(FLASHMLA)["rows"]
    dense = [row for row in rows if row["kind"] == "dense"]
    uneven = [row for row in dense if row["op"] > 1.01 * row["peer"]]
    share = round(geometric_mean(row["plan"] / row["peer"] for row in dense), 2)
    yield Sourced(
        README,
        FLASHMLA,
        [
            " ".join(" ".join(bench_flashmla.summary(rows)).split()),
            f"A share of {share:.2f} means {100 - 100 * share:.0f} % less time",
            f"with one they take {span([row['plan'] / row['peer'] for row in uneven])}",
        ],
    )
    shares = {
        kind: [row[column] / row["peer"] for row in saved(FLASHMLA_H100)["rows"] if row["kind"] == kind]
        for kind, column in (("dense", "plan"), ("sparse", "op"), ("prefill", "drop_in"))
    }
    rows_of = {kind: f"{geometric_mean(own):.3f}" for kind, own in shares.items()}
    slower = {kind: sum(share > 1.01 for share in own) for kind, own in shares.items()}
    yield Sourced(
        README,
        FLASHMLA_H100,
        [
            f"took {rows_of['dense']} of FlashMLA's time with a plan in {len(shares['dense'])} dense rows ("
            f"{slower['dense']} above 1.01x), {rows_of['sparse']} in {len(shares['sparse'])} sparse rows "
            f"({slower['sparse']}) and {rows_of['prefill']} in {len(shares['prefill'])} rows of sparse prefill "
            f"({slower['prefill']}; the worst {max(shares['prefill']):.2f})",
        ],
    )
    (long,) = (row for row in dense if row["name"] == "B64 H128 q1 kv16384")
    yield Sourced(
        PUBLISHED, FLASHMLA, [f"{long['plan']:.1f} us with a plan beside FlashMLA's {long['peer']:.1f} in one run"]
    )
    invariant, plain = [], []
    for row in dense:
        heads, q_len = (int(word[1:]) for word in row["name"].split()[1:3])
        invariant.append(row[f"split_{batch_invariant_split_size(heads, q_len)}"] / row["peer"])
        plain.append(row["op"] / row["peer"])
    yield Sourced(
        SERVING,
        FLASHMLA,
        [
            f"takes {geometric_mean(invariant):.2f} times as long as FlashMLA, which is not batch-invariant, in the "
            f"geometric mean over {len(invariant)} shapes (the worst {max(invariant):.2f} times)",
            f"our call without `split_size` takes {geometric_mean(plain):.2f} times as long",
        ],
    )


def reduction() -> Iterator[Sourced]:
    latency: dict[tuple[str, ...], dict[str, float]] = {}
    planned: dict[tuple[str, ...], int] = {}
    for row in saved(REDUCE):
        assert row["unit"] == "us"
        shape = row["tokens"], row["heads"], row["splits"]
        latency.setdefault(shape, {})[row["runner"]] = float(row["latency"])
        if row["runner"] == "stock":
            planned[shape] = int(row["partial_tiles"])
    uniform = [each["ours"] / each["stock_uniform"] for each in latency.values()]
    stock = {shape: each["ours"] / each["stock"] for shape, each in latency.items()}
    worst = max(stock, key=stock.__getitem__)
    merged = [ratio for shape, ratio in stock.items() if planned[shape]]
    assert planned[worst] == 0
    yield Sourced(
        PUBLISHED,
        REDUCE,
        [
            f"All {len(uniform)} shapes",
            f"ours takes {geometric_mean(uniform):.2f} of the time of the stock formulation over the same partial "
            f"tiles, geometric mean, and is slower at {sum(ratio > 1 for ratio in uniform)} shapes",
            f"{geometric_mean(stock.values()):.3f} of its time as the planner leaves it, slower at "
            f"{sum(ratio > 1 for ratio in stock.values())}, worst {stock[worst]:.1f} times at {' x '.join(worst)}",
            f"over the {len(merged)} shapes where the planner leaves something to merge {geometric_mean(merged):.2f}",
        ],
    )


def hugging_face() -> Iterator[Sourced]:
    rows = {(row["model"], row["mode"]): row for row in saved(TRANSFORMERS)}
    ours, theirs = rows["patched", "compiled"], rows["unpatched", "compiled"]
    text = (
        f"**{float(ours['ms']):.2f} ms** per decode step beside {float(theirs['ms']):.1f}; reading its weights and "
        f"latents once takes {float(ours['floor_ms']):.2f}"
    )
    yield Sourced(README, TRANSFORMERS, [text])


def e4m3_caches() -> Iterator[Sourced]:
    rows = saved(FLASHMLA_E4M3)["rows"]
    columns = [[row[name] / row["peer"] for row in rows] for name in ("plan", "bf16_q", "fp8_plan")]
    shares = [f"{geometric_mean(own):.3f}" for own in columns]
    slower = [sum(share > 1.01 for share in own) for own in columns]
    for column, part in (("plan", 0.26), ("fp8_plan", 1 / 3)):
        assert max(row[f"{column}_error"] / row["peer_error"] for row in rows) < part
    yield Sourced(
        README,
        FLASHMLA_E4M3,
        [
            f"took {shares[0]} of FlashMLA's time with e4m3 queries and a plan in {len(rows)} rows ({slower[0]} above "
            f"1.01x; the worst {max(columns[0]):.2f},",
            f"and {shares[1]} with bf16 queries ({slower[1]}; {max(columns[1]):.2f})",
            f"it took {shares[2]} ({slower[2]}; {max(columns[2]):.2f})",
        ],
    )
    # Columns: before, now, a bf16 cache, FlashMLA; a cell has the times with bf16 and with e4m3 queries.
    logged = log_table(DECODE_LOG, "e4m3 caches", "shape | before")
    (keys_first,) = re.findall(r"\| keys first: B128 H16 ([\d.]+) for", section(DECODE_LOG, "e4m3 caches"))
    of_bf16 = [us / row[2][0] for name, row in logged.items() if " H16 " not in name for us in row[1]]
    of_bf16.append(float(keys_first) / logged["B128 H16 kv 4096"][2][0])
    yield Sourced(README, DECODE_LOG, [f"at {span(of_bf16)} times the time of bf16 caches"])


def unrotated_caches() -> Iterator[Sourced]:
    rows = log_table(DECODE_LOG, "Un-rotated caches", "shape | rotated | before")
    shares = [row[2][0] / row[0][0] for row in rows.values()]
    yield Sourced(README, DECODE_LOG, [f"{span(shares)} times as long as rotated ones"])


def narrow_latents() -> Iterator[Sourced]:
    ratios = {width: row[2][0] for width, row in log_table(DECODE_LOG, "Narrow latents", "width | us").items()}
    widths = ("256 + 64", "256 + 32", "128 + 32")
    first, second, last = (f"{ratios[width]:.2f}" for width in widths)
    phrase = f"take {first}, {second} and {last} of the time of rows padded to 512 + 64"
    yield Sourced(README, DECODE_LOG, [phrase])


def batch_invariant() -> Iterator[Sourced]:
    text = section(COMBINE_LOG, "combine in batch-invariant mode")
    bounds, us = re.findall(r"a bound of ([\d,/ ]+) keys ([\d,/ ]+) us without a plan", text)[0]
    times = dict(zip(bounds.split(" / "), us.split(" / "), strict=True))
    yield Sourced(
        SERVING,
        COMBINE_LOG,
        [
            f"took {times['131,072']} us for 128 sequences of 1,024 keys and 128 heads where the bound was 131,072, "
            f"for {times['1,024']} us where it was 1,024",
        ],
    )


def check_mode() -> Iterator[Sourced]:
    """The cost of check mode to one call of decode."""
    source = "benchmarks/results/check/h100.json"
    ms = saved(source)["ms_per_call"]
    each, hundredth = (ms[n] / ms["0"] for n in ("1", "100"))
    phrase = f"took {each:.1f} times its {ms['0']:.3f} ms with n = 1 and {hundredth:.2f} times with n = 100"
    yield Sourced(SERVING, source, [phrase])


def amd_time() -> Iterator[Sourced]:
    """The tables of the page are the reports of the programs that fit the model and compare kernels in it."""
    report = fit_amd_time.table(amd_points.points())
    blocks = [" ".join(block.split()) for block in report.split("\n\n")]
    yield Sourced("docs/amd_time_model.md", "tools/fit_amd_time.py", blocks)
    compared = " ".join(compare_amd_peers.summary(compare_amd_peers.stored()))
    yield Sourced("docs/amd_time_model.md", "tools/compare_amd_peers.py", [compared])


SOURCES: tuple[Callable[[], Iterator[Sourced]], ...] = (
    headline,
    reduction,
    hugging_face,
    e4m3_caches,
    unrotated_caches,
    narrow_latents,
    batch_invariant,
    check_mode,
    amd_time,
)
