"""Phrases of docs/servers_measured.md, and of README, on SGLang as the saved runs give them; as `vllm_figures`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean

from saved_figures import README, Sourced, saved, span
from vllm_figures import SERVERS

SGLANG, SGLANG_KERNELS = "benchmarks/results/sglang/h200.csv", "benchmarks/results/sglang/h200_kernels.csv"
SGLANG_PROMPTS = "benchmarks/results/sglang/h200_prompts.csv"
SGLANG_V3, SGLANG_FP8_PROMPTS, SGLANG_EXPANDED, SGLANG_FOLLOWUPS, SGLANG_PARTS, SGLANG_PARTS_PROMPTS = (
    f"benchmarks/results/sglang/h200_{what}.csv"
    for what in ("v3", "prompts_fp8", "expanded", "followups", "parts", "parts_prompts")
)
SGLANG_V32, SGLANG_GRAPH_PROMPTS = (f"benchmarks/results/sglang/h200_{what}.csv" for what in ("v32", "graph_prompts"))

LONG = "2000", "4096", "16384"  # tokens of prompts
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
    of_readme = "{} with V3.2 over bf16 rows", "{} over its records of 656 bytes"
    phrases = [phrase.format(span(ratios)) for phrase, ratios in zip(of_readme, [*busy.values()][1:], strict=True)]
    yield Sourced(README, SGLANG, phrases)


def sglang_parts() -> Iterator[Sourced]:
    """Steps whose queries come in two parts: means of two runs."""
    of: dict[str, dict[str, list[float]]] = {}
    for row in saved(SGLANG_PARTS):
        of.setdefault(row["backend"], {}).setdefault(row["batch"], []).append(float(row["busy_us"]))
    theirs, ours = ([mean(runs) for runs in of[backend].values()] for backend in ("fa3", "mla_suite"))
    ratios = [after / before for before, after in zip(theirs, ours, strict=True)]
    four = "{:.0f}, {:.0f}, {:.0f} and {:.0f}"
    phrases = [f"{four} us with `fa3`".format(*theirs), f"for {four} with ours".format(*ours)]
    phrases += ["ours: {:.2f}, {:.2f}, {:.2f} and {:.2f}".format(*ratios)]
    yield Sourced(SERVERS, SGLANG_PARTS, phrases)
    yield Sourced(README, SGLANG_PARTS, [f"**{span(ratios)}** of the time with V3"])


def sglang_parts_prompts() -> Iterator[Sourced]:
    """Prompts whose queries come in two parts, in SGLang's graphs."""
    of: dict[tuple[str, ...], dict[str, str]] = {
        (row["backend"], row["cached"], row["new"]): row for row in saved(SGLANG_PARTS_PROMPTS)
    }
    ratios: dict[str, list[float]] = {}
    for (backend, cached, new), row in of.items():
        if (backend, row["keys"]) == ("mla_suite", "absorbed"):
            share = float(row["busy_us"]) / float(of["fa3", cached, new]["busy_us"])
            ratios.setdefault(cached, []).append(share)
    kinds = ("0", "1024"), ("2048", "512")
    late = [float(of[(name, *kind)]["first_token_ms"]) for name in ("mla_suite", "fa3") for kind in kinds]
    phrases = [
        "took **{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f}** of `fa3`'s time".format(*ratios["0"]),
        "behind 2,048 {:.2f}, {:.2f}, {:.2f} and {:.2f}".format(*ratios["2048"]),
        "{:.1f} and {:.1f} ms, where `fa3` in its graphs took {:.1f} and {:.1f}".format(*late),
    ]
    yield Sourced(SERVERS, SGLANG_PARTS_PROMPTS, phrases)
    every = span([*ratios["0"], *ratios["2048"]])
    yield Sourced(README, SGLANG_PARTS_PROMPTS, [f"64 to 512 tokens in its graphs **{every}**"])


def sglang_graph_prompts() -> Iterator[Sourced]:
    """Prompts that stay in SGLang's graphs since twice as much has to be saved by leaving them, and one that leaves."""
    theirs, ours = (
        {(row["cached"], row["new"]): row for row in saved(SGLANG_GRAPH_PROMPTS) if row["backend"] == backend}
        for backend in ("fa3", "mla_suite")
    )
    kept, left = (("0", "1024"), ("2048", "512")), ("2048", "1024")
    ms = {kind: [float(rows[kind]["first_token_ms"]) for rows in (ours, theirs)] for kind in (*kept, left)}
    busy = {kind: float(ours[kind]["busy_us"]) / float(theirs[kind]["busy_us"]) for kind in (*kept, left)}
    first = "first token came at {:.1f} and {:.1f} ms, and with `fa3` at {:.1f} and {:.1f}"
    phrases = [
        first.format(*(ms[kind][side] for side in (0, 1) for kind in kept)),
        "they took {:.2f} and {:.2f} of its busy time".format(*(busy[kind] for kind in kept)),
        f"were expanded, took {busy[left]:.2f} and came at {ms[left][0]:.1f} ms for {ms[left][1]:.1f}",
    ]
    yield Sourced(SERVERS, SGLANG_GRAPH_PROMPTS, phrases)


def sglang_v32_again() -> Iterator[Sourced]:
    """V3.2's steps in three runs, and beside the package of an earlier day."""
    of: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in saved(SGLANG_V32):
        of.setdefault(row["run"], {}).setdefault(row["backend"], []).append(row)

    def ratios(run: str, one: str, other: str) -> list[float]:
        pairs = zip(of[run][one], of[run][other], strict=True)
        return [float(mine["busy_us"]) / float(its["busy_us"]) for mine, its in pairs]

    first, second, third = (ratios(run, "mla_suite", "fa3") for run in "012")
    pairs = zip(of["2"]["mla_suite MLA_SUITE_NO_EARLY_LAUNCH=1"], of["2"]["mla_suite"], strict=True)
    longer = [float(late["step_us"]) - float(early["step_us"]) for late, early in pairs]
    phrases = [
        "{:.2f}, {:.2f} and {:.2f} of `fa3`'s busy time at batch 1, 32 and 128".format(*first),
        "then {:.2f}, {:.2f} and {:.2f}, and {:.2f} and {:.2f} at batch 1 and 32".format(*second, *third),
        "a step took {:.0f} and {:.0f} us longer".format(*longer),
        "took {:.2f} and {:.2f} of the time of this one".format(*ratios("2", "mla_suite 27195572", "mla_suite")),
    ]
    yield Sourced(SERVERS, SGLANG_V32, phrases)


def sglang_followups() -> Iterator[Sourced]:
    """Prompts behind cached tokens: of 128 heads with SGLang's graphs, without, and of 16 heads."""
    of: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in saved(SGLANG_FOLLOWUPS):
        kind = tuple(row[name] for name in ("kv_cache_dtype", "heads", "prefill_graphs", "cached", "new"))
        of.setdefault(kind, {})[row["backend"]] = row

    def pair(dtype: str, cached: str, new: str, heads: str = "128", graphs: str = "True") -> tuple[float, float]:
        found = of[dtype, heads, graphs, cached, new]
        return float(found["fa3"]["busy_us"]), float(found["mla_suite"]["busy_us"])

    def ratio(*kind: str) -> float:
        theirs, ours = pair(*kind)
        return ours / theirs

    lines = []
    for dtype, heads, graphs, cached, new in of:
        if (dtype, heads, graphs) != ("auto", "128", "True"):
            continue
        found = of[dtype, heads, graphs, cached, new]
        cells = [new, cached, found["mla_suite"]["keys"]]
        cells += [*(f"{us:.0f}" for us in pair(dtype, cached, new)), f"{ratio(dtype, cached, new):.2f}"]
        cells += [f"{float(found[name]['first_token_ms']):.1f}" for name in ("fa3", "mla_suite")]
        if ("fp8_e4m3", heads, graphs, cached, new) in of:
            cells += [*(f"{us:.0f}" for us in pair("fp8_e4m3", cached, new)), f"{ratio('fp8_e4m3', cached, new):.2f}"]
        else:
            cells += ["-"] * 3
        lines.append(f"| {' | '.join(cells)} |")
    expanded = [
        ratio(*kind[:1], *kind[3:]) for kind in of if kind[:3] == ("auto", "128", "True") and is_expanded(of[kind])
    ]
    long = [ratio("auto", cached, new) for cached in ("0", "2048", "16384") for new in ("2000", "4096", "16384")]
    short = [ratio("auto", "0", new) for new in ("256", "384", "512")]
    behind = [ratio("auto", cached, new) for cached in ("2048", "16384") for new in ("16", "64", "128", "256")]
    without = [ratio(*kind[:1], *kind[3:], *kind[1:3]) for kind in of if kind[2] == "False"]
    few = [ratio("auto", *kind[3:], "16") for kind in of if kind[1] == "16"]
    first = of["auto", "16", "True", "16384", "512"]
    later = float(first["mla_suite"]["first_token_ms"]) - float(first["fa3"]["first_token_ms"])
    phrases = [
        f"2,000 tokens and more took {span(long)} of the time",
        f"all that ours expanded {span(expanded)}",
        f"absorbed with ours {span(behind)} behind cached tokens",
        f"256 to 512 tokens behind none {span(short)}",
        f"its first token came {later:.0f} ms later",
        f"Without graphs both expand, and took {span(without)} of each other's time",
        "With 16 heads 512, 2,000 and 4,096 tokens behind none took {:.2f}, {:.2f} and {:.2f}".format(*few[:3]),
        "behind 16,384 {:.2f}, {:.2f} and {:.2f}".format(*few[3:]),
    ]
    yield Sourced(SERVERS, SGLANG_FOLLOWUPS, lines + phrases)
    yield Sourced(README, SGLANG_FOLLOWUPS, [f"**{span(long)}** of `fa3`'s time"])


def is_expanded(found: dict[str, dict[str, str]]) -> bool:
    return found["mla_suite"]["keys"] == "expanded"


def sglang_prompts() -> Iterator[Sourced]:
    of: dict[str, dict[str, float]] = {}
    for row in saved(SGLANG_PROMPTS):
        of.setdefault(row["tokens"], {})[row["backend"]] = float(row["first_token_ms"])
    ratios = [ms["mla_suite+mla_suite"] / ms["fa3"] for ms in of.values() if "mla_suite+mla_suite" in ms]
    yield Sourced(SERVERS, SGLANG_PROMPTS, [f"{span(ratios, 1)} times as long as `fa3`"])


def sglang_fp8() -> Iterator[Sourced]:
    """V3 over an fp8 cache, and a step over bf16 rows in the same run."""
    of: dict[tuple[str, ...], list[float]] = {}
    errors: dict[str, float] = {}
    for row in saved(SGLANG_V3):
        kind = row["kv_cache_dtype"], row["backend"], row["fp8_queries"]
        of.setdefault(kind, []).append(float(row["busy_us"]))
        errors[row["fp8_queries"]] = float(row["error"])
    theirs, ours = of["auto", "fa3", ""], of["auto", "mla_suite", ""]
    ratios = [after / before for before, after in zip(theirs, ours, strict=True)]
    quantised, plain = (of["fp8_e4m3", "mla_suite", given] for given in ("True", "False"))
    three = "{:.0f}, {:.0f} and {:.0f}"
    phrases = [
        f"for {three} us with `fa3` and for {three} with ours: {{:.2f}}, {{:.2f}} and {{:.2f}}".format(
            *theirs, *ours, *ratios
        ),
        f"took {three} us, and {three} with queries in bf16".format(*quantised, *plain),
        f"up to {100 * errors['False']:.1f} % away",
    ]
    yield Sourced(SERVERS, SGLANG_V3, phrases)


def sglang_fp8_prompts() -> Iterator[Sourced]:
    ms = {
        tuple(row[name] for name in ("kv_cache_dtype", "backend", "code", "graphs", "tokens")): float(
            row["first_token_ms"]
        )
        for row in saved(SGLANG_FP8_PROMPTS)
    }
    own = ("fp8_e4m3", "mla_suite")
    gained = [ms[(*own, "before", "False", tokens)] / ms[(*own, "now", "False", tokens)] for tokens in LONG]
    yield Sourced(SERVERS, SGLANG_FP8_PROMPTS, ["{:.1f}, {:.1f} and {:.1f} times as long as expanded".format(*gained)])


def sglang_expanded() -> Iterator[Sourced]:
    lines = []
    for row in saved(SGLANG_EXPANDED):
        absorbed = float(row["absorbed"])
        expanded = sum(float(row[part]) for part in ("gather", "up", "join", "attend"))
        cells = row["new"], row["cached"], f"{absorbed:.0f}", f"{expanded:.0f}", f"{absorbed / expanded:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    yield Sourced(SERVERS, SGLANG_EXPANDED, lines)


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


SOURCES: tuple[Callable[[], Iterator[Sourced]], ...] = (
    sglang_engine,
    sglang_parts,
    sglang_parts_prompts,
    sglang_graph_prompts,
    sglang_v32_again,
    sglang_followups,
    sglang_prompts,
    sglang_fp8,
    sglang_fp8_prompts,
    sglang_expanded,
    sglang_kernels,
)
