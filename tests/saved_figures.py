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
import vllm_engine
import vllm_server
import vllm_sparse_engine
from vllm_model import medians
from vllm_server import Load

from mla_suite import batch_invariant_split_size

ROOT = Path(__file__).parent.parent
RUNS = ("h200", "h100", "h100_e4m3")
FLASHMLA, FLASHMLA_H100, FLASHMLA_E4M3 = (f"benchmarks/results/flashmla/{run}.json" for run in RUNS)
REDUCE = "benchmarks/results/reduce/h200.csv"
ENGINE, ENGINE_FLASHMLA = "benchmarks/results/vllm/h200.csv", "benchmarks/results/vllm/h200_flashmla.csv"
ENGINES_SELECTING = [f"benchmarks/results/vllm/h200_{run}.csv" for run in ("v32", "v32_fp8", "v4")]
ENGINE_ROUNDS, ENGINE_CALLS = (f"benchmarks/results/vllm/h200_{what}.csv" for what in ("rounds", "calls"))
SERVER, DECODE = "benchmarks/results/vllm/h200_server.csv", "benchmarks/results/decode_sm90/h200.json"
TRANSFORMERS = "benchmarks/results/transformers/h200.csv"
DECODE_LOG, COMBINE_LOG = "csrc/sm_90/decode/PERF.md", "csrc/sm_90/combine/PERF.md"
SGLANG, SGLANG_KERNELS = "benchmarks/results/sglang/h200.csv", "benchmarks/results/sglang/h200_kernels.csv"
SGLANG_PROMPTS = "benchmarks/results/sglang/h200_prompts.csv"
README, SERVERS = "README.md", "docs/servers_measured.md"
SERVING, PUBLISHED = "docs/serving_engineer.md", "docs/published_work.md"


class Sourced(NamedTuple):
    """Phrases of a page whose figures come from one source, a file of this repository."""

    page: str
    source: str
    phrases: list[str]


def saved(path: str) -> Any:
    """The records of a saved run."""
    text = (ROOT / path).read_text()
    if path.endswith(".json"):
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


Steps = dict[tuple[int, int, str], dict[str, float]]  # by batch, context and backend


def engine_steps(path: str) -> Steps:
    """A run's rows, with what a layer pays."""
    names = vllm_engine.TIMED
    found = {
        (int(row["batch"]), int(row["context"]), row["backend"]): {name: float(row[name]) for name in names}
        for row in saved(path)
    }
    return {key: row | {"per_layer_us": vllm_engine.per_layer_us(row)} for key, row in found.items()}


def shares(found: Steps, peer: str, name: str) -> list[float]:
    """Ours / a backend's, of a column, at every shape."""
    return [row[name] / found[(*key[:2], peer)][name] for key, row in found.items() if key[2] == "CUSTOM"]


def engine() -> Iterator[Sourced]:
    found, before = engine_steps(ENGINE), engine_steps(ENGINE_FLASHMLA)
    lines = []
    for batch, context in sorted({key[:2] for key in found}):
        theirs, ours = (found[batch, context, name] for name in ("FLASH_ATTN_MLA", "CUSTOM"))
        cells = (
            *(f"{row['per_layer_us']:.1f}" for row in (theirs, ours)),
            f"{ours['per_layer_us'] / theirs['per_layer_us']:.2f}",
            *(f"{row['step_us'] / 1e3:.2f}" for row in (theirs, ours)),
            f"{ours['step_us'] / theirs['step_us']:.2f}",
        )
        lines.append(f"| {batch} x {context} | {' | '.join(cells)} |")
    layer, step = (span(shares(found, "FLASH_ATTN_MLA", name)) for name in ("per_layer_us", "step_us"))
    layer_flashmla, step_flashmla = (span(shares(before, "FLASHMLA", name)) for name in ("per_layer_us", "step_us"))
    text = f"takes **{layer}** of FlashAttention's time and a whole step **{step}**"
    yield Sourced(README, ENGINE, [text])
    text = f"**{layer_flashmla}** and {step_flashmla} of FlashMLA's"
    yield Sourced(README, ENGINE_FLASHMLA, [text])
    theirs, ours = (found[128, 1024, name] for name in ("FLASH_ATTN_MLA", "CUSTOM"))
    won = theirs["per_layer_us"] - ours["per_layer_us"]
    yield Sourced(
        SERVERS,
        ENGINE,
        [
            *lines,
            f"a step takes {step} of what it does with FlashAttention",
            f"attention wins {won:.0f} us a layer and the step {(theirs['step_us'] - ours['step_us']) / 16:.0f}",
            f"at 128 x 1024 had given {ours['tokens_per_s']:,.0f} and {theirs['tokens_per_s']:,.0f}",
        ],
    )
    alone = {row["name"]: row for row in saved(DECODE)["rows"]}
    one, many = alone["B1 H128 kv1024 q1"], alone["B128 H128 kv4096 q1"]
    flashmla, ours_us = (
        [before[batch, context, name]["per_layer_us"] for batch, context in ((1, 1024), (128, 4096))]
        for name in ("FLASHMLA", "CUSTOM")
    )
    yield Sourced(
        SERVERS,
        DECODE,
        [
            f"{flashmla[0]:.0f} us for {one['peer_us']:.1f} at 1 x 1024, {flashmla[1]:.0f} for {many['peer_us']:.0f} "
            f"at 128 x 4096. Ours takes {ours_us[0]:.1f} for {one['us']:.1f} and {ours_us[1]:.0f} for {many['us']:.0f}",
        ],
    )
    long = {key: row for key, row in before.items() if key[1] == 16384}
    long_layer, long_step = (span(shares(long, "FLASH_ATTN_MLA", name)) for name in ("per_layer_us", "step_us"))
    step_before = span(shares(before, "FLASH_ATTN_MLA", "step_us"))
    yield Sourced(
        SERVERS,
        ENGINE_FLASHMLA,
        [
            f"{layer_flashmla} of FlashMLA's time for a layer's attention and {step_flashmla} for a step",
            f"over 16,384 tokens {long_layer} and {long_step} of FlashAttention's",
            f"a step took {step_before} of FlashAttention's",
        ],
    )


def engines_that_select() -> Iterator[Sourced]:
    of_readme = "{} of their time over V3.2's bf16 rows", "{} over its records of 656 bytes", "{} with V4"
    for path, phrase in zip(ENGINES_SELECTING, of_readme, strict=True):
        rows, lines, steps = saved(path), [], []
        peer = rows[0]["backend"]
        theirs, ours = ([row for row in rows if (row["backend"] == peer) is is_peer] for is_peer in (True, False))
        for pair in zip(theirs, ours, strict=True):
            attention, step = ([float(row[name]) for row in pair] for name in vllm_sparse_engine.TIMED[:2])
            steps.append(step[1] / step[0])
            cells = (
                *(f"{us:.1f}" for us in attention),
                f"{attention[1] / attention[0]:.2f}",
                *(f"{us:.0f}" for us in step),
                f"{steps[-1]:.2f}",
            )
            lines.append(f"`{peer}` | {pair[0]['batch']} | {' | '.join(cells)} |")
        yield Sourced(SERVERS, path, lines)
        yield Sourced(README, path, [phrase.format(span(steps))])


def engines_in_turns() -> Iterator[Sourced]:
    """What vLLM's engines gave in rounds, and what its Python did in one."""
    rounds: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in saved(ENGINE_ROUNDS):
        shape = row["model"], row["batch"], row["context"]
        rounds.setdefault(shape, {}).setdefault(row["backend"], []).append(float(row["tokens_per_s"]))
    lines = [
        f"| {model.upper()}, {batch} x {context} | "
        + " | ".join(", ".join(f"{rate:.0f}" for rate in own) for own in found.values())
        + " |"
        for (model, batch, context), found in rounds.items()
    ]
    most = max(max(own) / min(own) for found in rounds.values() for own in found.values())
    yield Sourced(SERVERS, ENGINE_ROUNDS, [*lines, f"gave up to {most:.1f} times as much as its worst"])
    (v4, ours), prompts, v3 = (saved(ENGINE_CALLS)[at : at + 2] for at in (0, 2, 4))
    assert v4["calls"] == ours["calls"]
    ms = [round(1e3 * float(row["seconds"])) for row in saved(ENGINE_CALLS)]
    calls = [f"{int(row['calls']):,}" for row in (v4, *reversed(prompts), *v3)]
    phrases = [
        f"60 decode steps of V4 are {calls[0]} calls of functions with either backend",
        f"those of V3 are {calls[3]} with FlashAttention and {calls[4]} with ours",
        f"ours took {ms[1]} ms for {ms[0]} in V4 and {ms[5]} for {ms[4]:,} in V3",
        f"{calls[1]} calls with ours and {calls[2]} with vLLM's, in {ms[3]} and {ms[2]} ms",
    ]
    yield Sourced(SERVERS, ENGINE_CALLS, phrases)
    theirs, ours = [row for row in saved(ENGINES_SELECTING[2]) if row["batch"] == "8"]
    rates = [round(float(row["tokens_per_s"])) for row in (ours, theirs)]
    text = "at batch 8 had given {:,} tokens/s with ours and {:,} with vLLM's backend".format(*rates)
    yield Sourced(SERVERS, ENGINES_SELECTING[2], [text])


V3 = "v3", "auto"  # a model and a cache of bench_sglang.py


def sglang_engine() -> Iterator[Sourced]:
    rows = [row for row in saved(SGLANG) if (row["model"], row["kv_cache_dtype"]) != (V3[0], "fp8_e4m3")]
    lines, busy = [], dict[tuple[str, str], list[float]]()
    for shape in dict.fromkeys((row["model"], row["kv_cache_dtype"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["model"], row["kv_cache_dtype"], row["batch"]) == shape]
        theirs, ours = ([row for row in own if (row["backend"] == "mla_suite") is is_ours] for is_ours in (False, True))
        cells = [f"`{theirs[0]['backend']}`", shape[2]]
        for name in ("busy_us", "step_us"):
            pairs = [[float(row[name]) for row in pair] for pair in zip(theirs, ours, strict=True)]
            ratios = [after / before for before, after in pairs]
            cells += [", ".join(f"{us:.0f}" for us in each) for each in zip(*pairs, strict=True)]
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
            if name == "busy_us":
                busy.setdefault(shape[:2], []).extend(ratios)
        lines.append(f"{' | '.join(cells)} |")
    alone = [float(row["busy_us"]) for row in saved(SGLANG) if row not in rows]
    of = {
        backend: [
            row for row in saved(SGLANG) if (row["model"], row["kv_cache_dtype"], row["backend"]) == (*V3, backend)
        ]
        for backend in ("mla_suite", "fa3")
    }
    ours, theirs = ([float(row["period_us"]) / 1000 for row in own if row["batch"] == "32"] for own in of.values())
    last = [float(row["busy_us"]) for row in of["mla_suite"] if row["batch"] == "128"]
    phrases = [
        "ours alone: {:.0f}, {:.0f} and {:.0f} us".format(*alone),
        f"by up to {100 * (max(last) / min(last) - 1):.0f} %",
        "at batch 32: {:.1f} and {:.1f} ms, with `fa3` {:.1f} and {:.1f}".format(*ours, *theirs),
    ]
    yield Sourced(SERVERS, SGLANG, lines + phrases)
    of_readme = "**{}** of the time with V3", "{} with V3.2 over bf16 rows", "{} over its records of 656 bytes"
    phrases = [phrase.format(span(ratios)) for phrase, ratios in zip(of_readme, busy.values(), strict=True)]
    yield Sourced(README, SGLANG, phrases)


def sglang_prompts() -> Iterator[Sourced]:
    of: dict[str, dict[str, float]] = {}
    for row in saved(SGLANG_PROMPTS):
        of.setdefault(row["tokens"], {})[row["backend"]] = float(row["first_token_ms"])
    lines = []
    for tokens, ms in of.items():
        theirs, ours, triton = (ms.get(name) for name in ("fa3", "mla_suite", "mla_suite+mla_suite"))
        ratio = "-" if triton is None else f"{triton / theirs:.1f}"
        shown = ["-" if each is None else f"{each:.1f}" for each in (theirs, ours, triton)]
        lines.append(f"| {' | '.join((tokens, *shown, ratio))} |")
    yield Sourced(SERVERS, SGLANG_PROMPTS, lines)


def sglang_kernels() -> Iterator[Sourced]:
    """The kernel of each, by a part of its name that no other row of the model, backend and batch has."""

    def us(model: str, backend: str, batch: int, name: str) -> float:
        shape = model, backend, str(batch)
        own = [row for row in saved(SGLANG_KERNELS) if (row["model"], row["backend"], row["batch"]) == shape]
        (found,) = (float(row["us"]) for row in own if name in row["kernel"])
        return found

    pairs = [
        [
            us(model, *kernel)
            for kernel in (("mla_suite", 128, "decode_"), ("fa3", 128, "Sm90"), ("fa3", 128, "prepare"))
        ]
        for model in ("v3", "v32")
    ]
    joined = [us("v3", "mla_suite", batch, "concat") for batch in (128, 32, 1)]
    lists = [sum(us("v3", "mla_suite", batch, name) for name in ("create", "get_num")) for batch in (1, 32, 128)]
    phrases = [
        "took {:.0f} us in V3 where FlashAttention's took {:.0f} and its preparation {:.0f}".format(*pairs[0]),
        "and {:.0f} in V3.2 where they took {:.0f} and {:.0f}".format(*pairs[1]),
        "took {:.0f} us more, {:.0f} at batch 32 and {:.0f} at batch 1".format(*joined),
        f"two kernels of together {min(lists):.0f} to {max(lists):.0f} us",
    ]
    yield Sourced(SERVERS, SGLANG_KERNELS, phrases)


def server() -> Iterator[Sourced]:
    rows = [
        {"backend": each["backend"], "load": Load(*(int(each[name]) for name in ("concurrency", "input", "output")))}
        | {name: float(each[name]) for name in (*vllm_server.FIELDS, "seconds")}
        for each in saved(SERVER)
    ]
    found = medians(rows, ("load", "backend"), vllm_server.FIELDS)
    lines, ratios, prefill = [], [], []
    for load in dict.fromkeys(load for load, _ in found):
        ours, peer, triton = (found[load, backend] for backend in ("CUSTOM", "FLASHMLA", "TRITON_MLA"))
        ratios.append(ours["tokens_per_s"] / peer["tokens_per_s"])
        cells = (
            *(f"{each['tokens_per_s']:.0f}" for each in (ours, peer, triton)),
            f"{ratios[-1]:.2f}",
            *(f"{each['tpot_ms']:.1f} ({each['p99_tpot_ms']:.1f})" for each in (ours, peer)),
        )
        lines.append(f"| {load} | {' | '.join(cells)} |")
        prefill.append(f"{ours['ttft_ms'] / 1e3:.1f} of {ours['seconds']:.1f} s at {load.concurrency} x {load.input}")
    yield Sourced(README, SERVER, [f"**{span(ratios)}** times the output tokens per second"])
    yield Sourced(SERVERS, SERVER, [*lines, f"it takes {prefill[0]} and {prefill[1]}"])


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
    engine,
    engines_that_select,
    engines_in_turns,
    sglang_engine,
    sglang_prompts,
    sglang_kernels,
    server,
    hugging_face,
    e4m3_caches,
    unrotated_caches,
    narrow_latents,
    batch_invariant,
    check_mode,
    amd_time,
)
