"""Phrases of docs/servers_measured.md, and of README, on SGLang as the saved runs give them; as `vllm_figures`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from saved_figures import README, Sourced, saved, span
from vllm_figures import SERVERS

SGLANG, SGLANG_KERNELS = "benchmarks/results/sglang/h200.csv", "benchmarks/results/sglang/h200_kernels.csv"
SGLANG_PROMPTS = "benchmarks/results/sglang/h200_prompts.csv"
SGLANG_V3, SGLANG_FP8_PROMPTS, SGLANG_EXPANDED = (
    f"benchmarks/results/sglang/h200_{what}.csv" for what in ("v3", "prompts_fp8", "expanded")
)

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
    lines = []
    for graphs, tokens in (("False", "2000"), ("False", "4096"), ("False", "16384"), ("True", "512"), ("True", "2000")):
        before, now = (ms["fp8_e4m3", "mla_suite", code, graphs, tokens] for code in ("before", "now"))
        theirs = ms.get(("fp8_e4m3", "fa3", "", graphs, tokens))
        cells = tokens, "no" if graphs == "False" else "yes", f"{before:.1f}", f"{now:.1f}", f"{before / now:.1f}"
        lines.append(f"| {' | '.join(cells)} | {'-' if theirs is None else f'{theirs:.1f}'} |")
    alone, in_graph = (ms["auto", "fa3", "", graphs, "2000"] for graphs in ("False", "True"))
    lines.append(f"`fa3` took {alone:.1f} ms for 2,000 tokens, and {in_graph:.1f} in a graph")
    yield Sourced(SERVERS, SGLANG_FP8_PROMPTS, lines)


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
    sglang_prompts,
    sglang_fp8,
    sglang_fp8_prompts,
    sglang_expanded,
    sglang_kernels,
)
