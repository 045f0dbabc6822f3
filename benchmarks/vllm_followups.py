"""Follow-ups in a real vLLM engine on a GPU: a few new tokens behind a long cached prefix, by attention backend.

    python benchmarks/bench_vllm.py followups [--backends FLASH_ATTN_MLA,FLASHMLA,CUSTOM] [--csv FILE]

A backend says up to how many new tokens vLLM attends with absorbed weights; behind longer prompts it expands every
cached key, in kernels that all backends share. Each backend has an engine for each number of heads, with the model of
`bench_vllm.py engine`. Prefixes are prefilled once, then found in vLLM's prefix cache; new tokens are random each time.

Columns, of the step that computes a follow-up, alone or beside `--decodes` running sequences:
threshold     new tokens up to which weights are absorbed; own: what the backend says. CUSTOM is measured with others
              too
keys          whether the follow-up was attended with absorbed weights, or over expanded keys
busy_us       the time in which any kernel runs, median of the steps that torch's profiler saw
per_layer_us  busy_us / layers; what is outside of layers is the same for all, some tens of us
first_ms      from a request to its first token, median: vLLM's Python is in it, and with few layers most of it
decode_us     busy time of a step of the running sequences alone

Before anything is timed, a check: attention with absorbed weights in follow-ups of all these lengths behind the
shortest prefix is compared with its definition in fp32 over the engine's own cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import vllm_turns
from profiles import Kernel, busy_us, recorded, short
from vllm_check import watched
from vllm_engine import MAX_TOKENS, Sequences, filled
from vllm_model import ON_GPU, OURS, PEER, VOCAB, Contexts, Row, Split, save_config, start_engine, versions

from mla_suite.bench.saving import Table
from mla_suite.cli import sizes, writable

WARM, TIMED, PROFILED = 2, 7, 3  # follow-ups of each kind
LARGEST = 2  # kernels of a step that a row names
STEP = "spin_kernel"  # torch.cuda._sleep's, ahead of each step
OWN = 0  # the threshold that a backend has by itself
SHOWN = (
    *("heads", "backend", "decodes", "prefix", "new", "threshold", "keys"),
    *("busy_us", "per_layer_us", "first_ms", "decode_us"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends", default=f"{PEER},FLASHMLA,{OURS}", help="vLLM's names, comma-separated, all at once on the GPU"
    )
    parser.add_argument("--heads", type=sizes, default=(128, 16), help="attention heads, of an engine each")
    parser.add_argument("--prefixes", type=sizes, default=(1024, 4096, 16384), help="cached tokens of a follow-up")
    parser.add_argument("--new", type=sizes, default=(8, 32, 64, 128, 256, 512), help="its new tokens")
    parser.add_argument("--decodes", type=int, default=32, help="sequences that decode beside it (default: 32)")
    parser.add_argument("--context", type=int, default=4096, help="cached tokens of each of these (default: 4096)")
    parser.add_argument("--thresholds", type=sizes, default=(1, 512), help="of CUSTOM, beside its own (default: 1,512)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: 8)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (bf16) or fp8")
    parser.add_argument("--skip-check", action="store_true", help="time without comparing results first")
    parser.add_argument("--csv", type=writable, help="write the rows to this file as they come")
    parser.add_argument("--alone", metavar="BACKEND", help=argparse.SUPPRESS)


def divided(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Those of each step, which begins with STEP, without it and without what ran before the first."""
    steps: list[list[Kernel]] = []
    for kernel in kernels:
        if STEP in kernel[0]:
            steps.append([])
        elif steps:
            steps[-1].append(kernel)
    return steps


def largest(kernels: Sequence[Kernel], layers: int) -> str:
    """The names of the kernels that take longest, and their microseconds per layer."""
    total: Counter[str] = Counter()
    for name, start, end in kernels:
        total[short(name)] += end - start  # type: ignore[assignment]
    return "; ".join(f"{name} {us / layers:.1f}" for name, us in total.most_common(LARGEST))


def note_steps(process: Any, steps: list[int]) -> None:
    """Append to `steps`, before each step, the most tokens that it computes of a sequence; mark it on the device."""
    runner = process.model_runner
    execute = runner.execute_model

    def noted(scheduled: Any, *args: Any, **given: Any) -> Any:
        steps.append(max(scheduled.num_scheduled_tokens.values(), default=0))
        if ON_GPU:
            torch.cuda._sleep(1)
        return execute(scheduled, *args, **given)

    runner.execute_model = noted


class FollowUps:
    """Requests to an engine that begin with a prefix from its cache."""

    def __init__(self, llm: Any, split: Split, options: argparse.Namespace) -> None:
        self.llm, self.engine, self.split, self.options = llm, llm.llm_engine, split, options
        self.others, self.steps = Sequences(llm, filled), list[int]()
        self._generator, self._count = torch.Generator().manual_seed(0), 0
        llm.collective_rpc(note_steps, args=(self.steps,))

    def _ids(self, tokens: int, generator: torch.Generator) -> list[int]:
        return torch.randint(2, VOCAB, (tokens,), generator=generator).tolist()

    def first_token(self, prefix: int, new: int) -> tuple[float, int]:
        """Seconds until a follow-up's token, and how many of its tokens were cached."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        ids = self._ids(prefix, torch.Generator().manual_seed(prefix)) + self._ids(new, self._generator)
        self._count += 1
        name = f"follow-up {self._count}"
        begun = time.perf_counter()
        self.engine.add_request(name, {"prompt_token_ids": ids}, params)
        while True:
            for found in self.engine.step():
                if found.request_id == name and found.outputs[0].token_ids:
                    return time.perf_counter() - begun, found.num_cached_tokens

    def cached(self, prefix: int, new: int) -> float:
        """Seconds until the token of a follow-up whose prefix was cached; AssertionError where it was not."""
        seconds, found = self.first_token(prefix, new)
        if found != prefix:
            raise AssertionError(f"{found} of {prefix} tokens came from the cache")
        return seconds

    def beside(self, decodes: int) -> None:
        """Let as many sequences decode from now on, with new contexts."""
        self.others.end()
        Contexts.filled = True
        self.others.start(decodes, self.options.context)
        Contexts.filled = False

    def thresholds(self) -> tuple[int, ...]:
        return (OWN, *(self.options.thresholds if self.options.alone == OURS else ()))

    def check(self) -> Row:
        """Attention's worst error in follow-ups behind the shortest prefix, alone and beside others."""
        prefix = min(self.options.prefixes)
        self.first_token(prefix, 1)
        with watched(self.llm, "v3", self.split) as errors:
            for decodes in (0, self.options.decodes):
                self.beside(decodes)
                for threshold in self.thresholds():
                    self.split.threshold = threshold
                    for new in self.options.new:
                        self.cached(prefix, new)
        return {"compared": len(errors), "error": max(error for _, error in errors)}

    def measure(self, decodes: int, prefix: int) -> Row:
        """Rows of all thresholds and lengths."""
        self.first_token(prefix, 1)
        return {"rows": [row for threshold in self.thresholds() for row in self._rows(decodes, prefix, threshold)]}

    def _rows(self, decodes: int, prefix: int, threshold: int) -> list[Row]:
        self.beside(decodes)  # anew, as contexts grow with every step
        self.split.threshold, rows = threshold, list[Row]()
        for new in self.options.new:
            seconds = [self.cached(prefix, new) for _ in range(WARM + TIMED)][WARM:]
            self._settle(decodes)
            keys = "expanded" if self.split.expanded[new] else "absorbed"
            facts = {"prefix": prefix, "new": new, "decodes": decodes, "threshold": threshold or "own", "keys": keys}
            rows.append(facts | {"first_ms": 1e3 * median(seconds)})
        if ON_GPU:
            for row, found in zip(rows, self._profiled(decodes, prefix), strict=True):
                row |= found
        return rows

    def _settle(self, decodes: int) -> None:
        """Steps of the other sequences alone, so that the engine has none of a follow-up under way."""
        for _ in range(2 if decodes else 0):
            self.engine.step()

    def _profiled(self, decodes: int, prefix: int) -> list[Row]:
        self.steps.clear()
        with recorded() as all_kernels:
            for new in self.options.new:
                for _ in range(PROFILED):
                    self.cached(prefix, new)
                    self._settle(decodes)
        steps = divided(all_kernels)
        if len(steps) != len(self.steps):
            raise AssertionError(f"the profile has {len(steps)} steps, the engine made {len(self.steps)}")
        of: dict[int, list[list[Kernel]]] = {}
        for tokens, kernels in zip(self.steps, steps, strict=True):
            of.setdefault(tokens, []).append(kernels)
        alone = median(busy_us(step) for step in of[1]) if decodes else 0.0
        found = list[Row]()
        for new in self.options.new:
            us = median(busy_us(step) for step in of[new])
            row: Row = {"busy_us": us, "per_layer_us": us / self.options.layers, "decode_us": alone}
            found.append(row | {"kernels": largest(of[new][-1], self.options.layers)})
        return found


def work(options: argparse.Namespace) -> int:
    """One engine's process."""
    begun = time.time()
    (heads,) = options.heads
    longest = max(max(options.prefixes) + max(options.new), options.context + MAX_TOKENS) + 1
    options.batches = (options.decodes,)
    Contexts.install()
    split = Split.install()
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), "v3", options.layers, heads, longest)
        settings = dict(max_model_len=longest, max_num_seqs=options.decodes + 1, enable_prefix_caching=True)
        llm = start_engine(options.alone, options, Path(folder), **settings, **Contexts.SETTINGS)
    page = llm.llm_engine.vllm_config.cache_config.block_size
    follow = FollowUps(llm, split, options)
    return vllm_turns.serve(
        {"seconds": round(time.time() - begun), "page": page},
        {"check": follow.check, "measure": follow.measure},
    )


def main(options: argparse.Namespace) -> int:
    if options.alone:
        return work(options)
    if not ON_GPU:
        raise SystemExit("bench_vllm: no GPU here; on a CPU, `tox -e vllm33` sends follow-ups to its engine")
    facts = {"versions": versions(), "layers": options.layers, "context": options.context}
    print(*facts.values(), sep="; ")
    table = Table(options.csv, facts, shown=SHOWN)
    engines = {
        (heads, backend): vllm_turns.Engine(backend, "--heads", str(heads))
        for heads in options.heads
        for backend in options.backends.split(",")
    }
    with vllm_turns.started(list(engines.values())):
        for (heads, backend), engine in () if options.skip_check else engines.items():
            checked = engine.ask("check")
            found = f"{checked['compared']} attention outputs within {checked['error']:.1e} of fp32"
            print(f"{backend}, {heads} heads: {found}", flush=True)
        for decodes in (0, options.decodes):
            for prefix in options.prefixes:
                for (heads, backend), engine in engines.items():
                    for row in engine.ask("measure", decodes, prefix)["rows"]:
                        table.add({"heads": heads, "backend": backend} | row)
    return 0
