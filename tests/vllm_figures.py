"""Phrases of docs/servers_measured.md, and of README, on vLLM as the saved runs give them.

Like `saved_figures`, whose records these are: each function yields what one or two sources give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import vllm_engine
import vllm_server
from saved_figures import DECODE, README, SERVING, Sourced, saved, span
from vllm_model import medians
from vllm_server import Load

ENGINE, ENGINE_FLASHMLA = "benchmarks/results/vllm/h200.csv", "benchmarks/results/vllm/h200_flashmla.csv"
ENGINES_SELECTING = [f"benchmarks/results/vllm/h200_{run}.csv" for run in ("v32", "v32_fp8", "v4")]
ENGINE_ROUNDS, ENGINE_CALLS = (f"benchmarks/results/vllm/h200_{what}.csv" for what in ("rounds", "calls"))
ENGINE_FOLLOWUPS, ENGINE_TURNS = (f"benchmarks/results/vllm/h200_{what}.csv" for what in ("followups", "turns"))
SERVED, WIDENED = (f"benchmarks/results/served/h200_{what}.csv" for what in ("prompts", "widened"))
V4_TURNS = "benchmarks/results/vllm/h200_v4_turns.csv"
ENGINE_PROMPTS = "benchmarks/results/vllm/h200_v32_fp8_prompts.csv"
SERVER = "benchmarks/results/vllm/h200_server.csv"
SERVERS, PROMPTS = "docs/servers_measured.md", "docs/prompts.md"
RATES = ("tokens_per_s", "least_tokens_per_s", "most_tokens_per_s")
Steps = dict[tuple[int, int, str], dict[str, float]]  # by batch, context and backend


def engine_steps(path: str) -> Steps:
    """A run's rows, with what a layer pays."""
    names = ("attention_us", "plan_us", "between_us", "step_us", "tokens_per_s")
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
            attention, step = ([float(row[name]) for row in pair] for name in ("attention_us", "step_us"))
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


FOLLOWUPS = (("FLASH_ATTN_MLA", "own"), ("FLASHMLA", "own"), ("CUSTOM", "1"), ("CUSTOM", "512"))


def followups() -> Iterator[Sourced]:
    of: dict[tuple[int, ...], dict[tuple[str, str], float]] = {}
    for row in saved(ENGINE_FOLLOWUPS):
        shape = tuple(int(row[name]) for name in ("decodes", "heads", "prefix", "new"))
        of.setdefault(shape, {})[row["backend"], row["threshold"]] = float(row["per_layer_us"])

    def ratios(decodes: int, heads: int, news: Sequence[int], peer: tuple[str, str]) -> str:
        """Absorbed / a peer's."""
        found = [
            us[FOLLOWUPS[3]] / us[peer] for key, us in of.items() if key[:2] == (decodes, heads) and key[3] in news
        ]
        return span(found)

    def equal(heads: int, prefix: int) -> float:
        """Tokens for which both take as long, by straight lines between 256 and 512."""
        gap = [of[0, heads, prefix, new][FOLLOWUPS[3]] - of[0, heads, prefix, new][FOLLOWUPS[2]] for new in (256, 512)]
        return 256 - gap[0] * 256 / (gap[1] - gap[0])

    lines = []
    for decodes, prefix, new in sorted({(key[0], *key[2:]) for key in of}):
        us = [of[decodes, heads, prefix, new] for heads in (128, 16)]
        cells = (f"{each[column]:.0f}" for each in us for column in FOLLOWUPS)
        if new > 8 and not (decodes and (prefix == 1024 or new == 32)):
            lines.append(f"| {prefix:,}, {new} | {' | '.join(cells)} |")
    short, expanded, attention = (8, 32, 64, 128), FOLLOWUPS[2], FOLLOWUPS[0]
    phrases = [
        f"took absorbed {ratios(0, 128, short, expanded)} of expanded with 128 heads and "
        f"{ratios(0, 16, short, expanded)} with 16",
        f"of 256 tokens {ratios(0, 128, (256,), expanded)} and {ratios(0, 16, (256,), expanded)}",
        f"of 512 {ratios(0, 128, (512,), expanded)} and {ratios(0, 16, (512,), expanded)}",
        f"took {ratios(0, 128, (*short, 256), attention)} of FlashAttention's with 128 heads, "
        f"{ratios(0, 16, (*short, 256), attention)} with 16",
        f"beside decodes {ratios(32, 128, (*short, 256), attention)} and {ratios(32, 16, (*short, 256), attention)}",
        "{:.0f}, {:.0f} and {:.0f} tokens".format(*(equal(128, prefix) for prefix in (1024, 4096, 16384))),
    ]
    of_readme = [ratios(decodes, 128, (*short, 256), attention) for decodes in (0, 32)]
    text = f"takes **{of_readme[0]}** of the time, and beside 32 sequences that decode {of_readme[1]}"
    yield Sourced(README, ENGINE_FOLLOWUPS, [text])
    yield Sourced(SERVERS, ENGINE_FOLLOWUPS, lines + phrases)


def engine_turns() -> Iterator[Sourced]:
    """The shape that engines have been timed at in turns, on one core."""
    rows = [{name: float(row[name]) for name in ("step_us", "batch", *RATES)} for row in saved(ENGINE_TURNS)]
    rates = ["{:.0f} ({:.0f} to {:.0f})".format(*(row[name] for name in RATES)) for row in rows]
    (share,) = {f"{row['step_us'] * row['tokens_per_s'] / row['batch'] / 1e6:.2f}" for row in rows}
    text = f"{rates[0]} tokens/s with FlashAttention and {rates[1]} with ours, and the GPU's share {share}"
    yield Sourced(SERVERS, ENGINE_TURNS, [text])


def v4_turns() -> Iterator[Sourced]:
    rows = [{name: float(row[name]) for name in ("step_us", "batch", *RATES)} for row in saved(V4_TURNS)]
    of = ["{:,.0f} ({:,.0f} to {:,.0f})".format(*(row[name] for name in RATES)) for row in rows]
    shares = [row["step_us"] * row["tokens_per_s"] / row["batch"] / 1e6 for row in rows]
    texts = [
        f"at 1 x 4096 {of[0]} tokens/s with FlashMLA and {of[1]} with ours",
        f"at 8 x 4096 {of[2]} and {of[3]}, of which the GPU's share was {span(shares)}",
    ]
    yield Sourced(SERVERS, V4_TURNS, texts)


def served_prompts() -> Iterator[Sourced]:
    """Prompts among decodes, behind cached keys and over records, by `bench_served.py` and in vLLM's engine."""
    ratio = {row["row"]: f"{float(row['ratio']):.2f}" for path in (SERVED, WIDENED) for row in saved(path)}
    mixed = [
        [ratio[f"8 tokens of one and 1 of {others} sequences, H{heads}, apart beside together"] for others in (31, 127)]
        for heads in (128, 16)
    ]
    words = f"{mixed[0][0]} and {mixed[0][1]} of the time with 128 heads, {mixed[1][0]} and {mixed[1][1]} with 16"
    behind = [ratio[f"{n} tokens of 128 heads behind 16384 keys, absorbed beside expanded"] for n in (64, 256)]
    alone = f"took {behind[0]} of the time of expansion and cuDNN's attention for 64 tokens of 128 heads"
    yield Sourced(SERVING, SERVED, [words])
    yield Sourced(PROMPTS, SERVED, [alone, f"behind 16,384, and {behind[1]} for 256"])
    over = [ratio[f"8192 tokens of {heads} heads over 65536 keys, widened beside v32"] for heads in (128, 64, 16)]
    words = f"{over[0]} of the time with 128 heads, {over[1]} with 64 and {over[2]} with 16"
    yield Sourced(PROMPTS, WIDENED, [words])
    theirs, ours = (f"{int(row['prompt_tokens_per_s']):,}" for row in saved(ENGINE_PROMPTS))
    words = f"was read at {ours} tokens/s, with `FLASHMLA_SPARSE` at {theirs}"
    yield Sourced(SERVERS, ENGINE_PROMPTS, [words])


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


SOURCES: tuple[Callable[[], Iterator[Sourced]], ...] = (
    engine,
    engines_that_select,
    engines_in_turns,
    engine_turns,
    followups,
    served_prompts,
    v4_turns,
    server,
)
