"""decode, sparse_decode and sparse prefill beside FlashMLA's last Hopper kernels, all columns of a row in one run.

    pip install --no-deps sgl-flash-mla==1.0.0        FlashMLA as SGLang ships it: the peer
    python benchmarks/bench_flashmla.py --save benchmarks/results/flashmla/h200.json
    python benchmarks/bench_flashmla.py --report benchmarks/results/flashmla/h200.json --plot docs/flashmla.svg

Columns: `op` is the operator without a plan; `plan` has a plan made beforehand, as serving engines do; `drop_in` is
`mla_suite.integrations.flash_mla` called with the very arguments of the peer; `peer` is FlashMLA with its metadata made
beforehand. `--split-sizes 512,1024` adds `split_512` and `split_1024`, batch-invariant mode, with a plan where
lengths differ. A round replays a CUDA graph of calls over inputs of at least 160 MB (cold L2) and takes the median,
divided by the calls. A row's columns are measured in turns, a round of each after a short rest, there and back, since a
card that warms up slows down; a time is the median of a column's rounds. Every output is compared with fp32 before it
is timed, and a column that is wrong ends the program. flashmla_e4m3.py says which columns rows over e4m3 caches have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch
from definition import relative
from flashmla_e4m3 import E4M3, e4m3_case, exact_of
from flashmla_sparse import DEVICE, PREFILL, SPARSE, Case, Paged, prefill_case, sparse_case

import mla_suite
from mla_suite.bench import environment as known
from mla_suite.bench import sets
from mla_suite.bench.saving import write_whole
from mla_suite.bench.timer import REST_S, Replay, cold_turns
from mla_suite.cli import sizes, writable
from mla_suite.integrations import flash_mla as drop_in

KINDS = ("dense", "sparse", "prefill", "e4m3")
PAGE, MIN_CALLS = 64, 6
ROUNDS = 4  # of a column; an even number, so that all columns are as early as late
MAX_ERROR = 6e-3  # relative, of bf16 results against fp32
SCALE = 576**-0.5


class Dense(NamedTuple):
    """A row of the dense grid; lengths are all `kv`, or about that when ragged."""

    batch: int
    heads: int
    q_len: int
    kv: int
    lens: tuple[int, ...]

    @property
    def ragged(self) -> bool:
        return len(set(self.lens)) > 1

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads} q{self.q_len} kv{'~' if self.ragged else ''}{self.kv}"


DENSE = tuple(
    Dense(facts["batch"], facts["heads"], facts["q_len"], facts["kv_len"], case.lens)
    for case in sets.named("flashmla")
    if (facts := case.facts)["batch"] == 128 or facts["heads"] not in sets.OTHER_HEADS
)


def peer_module() -> Any:
    try:
        import flash_mla
    except ImportError as error:
        raise SystemExit(f"bench_flashmla: {error}; pip install --no-deps sgl-flash-mla==1.0.0") from error
    return flash_mla


class DenseTurn(NamedTuple):
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    plan: torch.Tensor
    split_plans: dict[int, torch.Tensor]  # by split_size


def dense_case(row: Dense, peer: Any, split_sizes: Sequence[int] = ()) -> Case:
    """bf16 caches in pages of 64, in random order; a column for each split size of batch-invariant mode."""
    lens, longest = row.lens, max(row.lens)
    width = -(-longest // PAGE)
    size = sum(lens) * 1152 + row.batch * row.q_len * row.heads * (576 + 512) * 2
    bounds = {"max_seqlen_q": row.q_len, "max_seqlen_kv": longest}
    turns = []
    for _ in range(cold_turns(size, DEVICE)):
        pages = row.batch * width
        table = torch.randperm(pages, device="cuda").int().view(row.batch, width)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        q = torch.randn(row.batch, row.q_len, row.heads, 576, device="cuda").bfloat16()
        cache = torch.randn(pages, PAGE, 576, device="cuda", dtype=torch.bfloat16)
        planned = partial(mla_suite.plan, seq_lens, num_heads=row.heads, **bounds)
        split_plans = {size: planned(split_size=size) for size in split_sizes if row.ragged}
        turns.append(DenseTurn(q, cache, table, seq_lens, planned(), split_plans))
    options = {"softmax_scale": SCALE, **bounds}
    own = Paged(drop_in, SCALE, causal=True, fp8=False)
    others = Paged(peer, SCALE, causal=True, fp8=False, use_legacy=True)

    def op(turn: DenseTurn, **more: Any) -> torch.Tensor:
        return mla_suite.decode(turn.q, turn.cache, turn.lens, turn.table, **more, **options)[0]

    def invariant(turn: DenseTurn, split_size: int) -> torch.Tensor:
        return op(turn, plan=turn.split_plans.get(split_size), split_size=split_size)

    columns = {
        "op": op,
        "plan": lambda turn: op(turn, plan=turn.plan),
        "drop_in": lambda turn: own(turn.q, turn.cache, turn.table, turn.lens),
        "peer": lambda turn: others(turn.q, turn.cache, turn.table, turn.lens),
    }
    columns |= {f"split_{size}": partial(invariant, split_size=size) for size in split_sizes}

    exact = partial(exact_of, lens=lens, scale=SCALE)
    return Case(columns, turns, exact, size, 2 * sum(lens) * row.q_len * row.heads * (576 + 512))


def measure(name: str, case: Case) -> dict[str, Any]:
    """Checks and times every column of a row."""
    some, wanted = case.exact(case.turns[0])
    found: dict[str, Any] = {"name": name, "bytes": case.bytes, "flops": case.flops}
    cycles = -(-MIN_CALLS // len(case.turns))
    replays: dict[str, Replay] = {}
    for column, call in case.columns.items():
        error = relative(call(case.turns[0])[some].view_as(wanted), wanted)
        allowed = case.errors.get(column, MAX_ERROR)
        if not error <= allowed:
            raise SystemExit(f"bench_flashmla: {name}: {column} is off by {error:.2g}, more than {allowed}")
        found[f"{column}_error"] = error
        replays[column] = Replay(call, case.turns * cycles)
    rounds: dict[str, list[float]] = {column: [] for column in replays}
    for index in range(ROUNDS):
        for column in list(replays) if index % 2 == 0 else reversed(replays):
            rounds[column].append(replays[column].round(REST_S / 2))
    return found | {column: round(median(own), 3) for column, own in rounds.items()}


def rows_of(kinds: Sequence[str], names: str) -> Iterator[tuple[str, Any]]:
    for kind, rows in (("dense", DENSE), ("sparse", SPARSE), ("prefill", PREFILL), ("e4m3", E4M3)):
        if kind in kinds:
            yield from ((kind, row) for row in rows if names in row.name)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the rows that the options choose, prints each, and saves all of them so far."""
    peer, facts = peer_module(), environment(options.commit)
    dense = partial(dense_case, split_sizes=options.split_sizes)
    make = {"dense": dense, "sparse": sparse_case, "prefill": prefill_case, "e4m3": e4m3_case}
    done: list[dict[str, Any]] = []
    for kind, row in rows_of(options.kind or list(make), options.rows):
        with torch.inference_mode():
            found = {"kind": kind, **measure(row.name, make[kind](row, peer))}
        done.append(found)
        times = "  ".join(
            f"{column} {found[column]:8.2f} ({found[column] / found['peer']:.2f})" for column in timed(found)
        )
        print(f"{row.name:26}{times}", flush=True)
        if options.save:
            write_whole(options.save, json.dumps({"environment": facts, "rows": done}, indent=1) + "\n")
    return done


def timed(row: dict[str, Any]) -> list[str]:
    """The columns that a row of a run has."""
    return [name.removesuffix("_error") for name in row if name.endswith("_error")]


def environment(commit: str = "", device: str = "cuda") -> dict[str, str]:
    """Facts of a run. Its commit is the one given, else that of the checkout, else `unknown`."""
    facts = {key: str(value) for key, value in known.describe(torch.device(device)).items()}
    facts["commit"] = commit or facts["commit"] or "unknown"
    # A saved run names its own file, never the folder that it was written to.
    command = " ".join([str(Path("benchmarks", Path(sys.argv[0]).name)), *(Path(word).name for word in sys.argv[1:])])
    return facts | {"peer": f"sgl-flash-mla {known.version('sgl-flash-mla')}", "command": command}


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: the geometric mean of every column's share of the peer's time, and how many rows are slower."""
    lines = ["| | rows | column | of FlashMLA's time | rows above 1.01x | worst |", "|---|---:|---|---:|---:|---:|"]
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        for column in timed(own[0]) if own else ():
            shares = [row[column] / row["peer"] for row in own]
            if column != "peer":
                slower = sum(share > 1.01 for share in shares)
                mean = geometric_mean(shares)
                lines.append(f"| {kind} | {len(shares)} | {column} | {mean:.3f} | {slower} | {max(shares):.2f} |")
    return lines


def plot(rows: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """A bar per row of the dense grid: the share of the peer's time, with a plan and without."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"bench_flashmla: --plot draws by matplotlib ({error}); pip install matplotlib") from error

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    own = [row for row in rows if row["kind"] == "dense"]
    figure, axes = plt.subplots(figsize=(11, 4.6))
    places = range(len(own))
    for column, shift, colour in (("op", -0.2, "#2a7fb8"), ("plan", 0.2, "#7fcdbb")):
        label = "without a plan" if column == "op" else "with a plan"
        axes.bar(
            [x + shift for x in places], [row[column] / row["peer"] for row in own], 0.4, color=colour, label=label
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(list(places), [row["name"] for row in own], rotation=90, fontsize=6)
    axes.set_ylabel("time / FlashMLA's time")
    axes.set_title(f"decode on an {device}, dense bf16 caches: below 1 is faster than FlashMLA", fontsize=10)
    axes.legend(frameon=False)
    axes.margins(x=0.01)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "mla_suite"  # the same file from the same rows
    figure.savefig(path, metadata={"Date": None})


def saved_run(path: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file that --save wrote, and the card that they were measured on."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return found["rows"], found["environment"]["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sentence = f"{path} is no run that --save wrote: {type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(sentence) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeatable (default: all)")
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    parser.add_argument(
        "--split-sizes", type=sizes, default=(), metavar="KEYS", help="batch-invariant columns, e.g. 512,1024"
    )
    parser.add_argument("--commit", default="", help="commit named in the saved run (default: that of this checkout)")
    parser.add_argument("--save", type=writable, help="write the rows to this file as they come")
    parser.add_argument(
        "--report", type=saved_run, metavar="FILE", help="print the summary of a saved run and measure nothing"
    )
    parser.add_argument("--plot", type=writable, metavar="SVG", help="with --report: draw the dense grid by matplotlib")
    options = parser.parse_args()
    if options.plot and not options.report:
        parser.error("--plot draws a saved run: name it with --report")
    if options.report:
        rows, card = options.report
        if options.plot:
            plot(rows, card, options.plot)
    elif not torch.cuda.is_available():
        raise SystemExit("bench_flashmla: needs an H100 or H200; --report reads a saved run anywhere")
    else:
        rows = run(options)
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
