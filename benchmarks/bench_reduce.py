"""The reduction after decode beside a restatement of AITER's stock one, on the grid that pull request 3468 publishes.

    python benchmarks/bench_reduce.py [--csv FILE] [--shapes b64-r16] [--arch gfx942,gfx950]
    python benchmarks/bench_reduce.py --runners stream,ours,general,triton,torch --sizes 1x128x66,128x128x2 [--cold]

A shape is query tokens x heads x splits, with KEYS_PER_SPLIT cached keys for each split. Ways to end its decode, of
which the first three are run if no others are named:

    stock           one kernel over general maps (reduce_indptr, reduce_final_map, reduce_partial_map), driven by the
                    persistent plan of the same sequences: the planner says how many partial tiles there are
    stock_uniform   the same kernel over ours' partial tiles
    ours            combine over that many splits of each token, by the kernel that dispatch picks
    general         by the kernel that any batch may use, in a fixed merge order
    triton          by Triton
    torch           softmax over the splits and a weighted sum, eager; torch_compiled: compiled
    stream          a kernel that reads and writes the same bytes and computes nothing

A partial tile is the partial result of one token in one split, of all heads. Where the planner splits nothing, the
stock kernel reads its maps and no more: decode wrote the results. The stock kernel is written here from what AITER
documents: persistent programs walk (tile, head), merge the tile's partials by an online softmax and write out and lse.
It is Triton and AITER's is HIP, so its times stand for the formulation, not for that kernel. On a GPU every result that
is left in combine's outputs is compared with fp64 first; times are of graph nodes, launch included, the partials found
in the cache as decode leaves them, or with `--cold` in memory. `of_first` is the latency over the first runner's.
Without a GPU: bytes over the chip's memory rate, in clocks, of each of the three; ours' are those that the emulator
sees loaded and stored. They say how much each moves and never which is faster, which only a GPU can show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mla_suite
from mla_suite.archs import ArchSpec
from mla_suite.archs import combine as combine_config
from mla_suite.bench import sets
from mla_suite.bench.saving import Table
from mla_suite.bench.timer import Effort, cold_turns, device_rounds, median
from mla_suite.cli import each_emulated, positive, writable
from mla_suite.core import dispatch
from mla_suite.errors import UsageError
from mla_suite.integrations import metadata_convert
from mla_suite.launch import emulate
from mla_suite.ops.combine import COMBINE, CombineArgs
from mla_suite.ops.combine import Problem as CombineProblem
from mla_suite.testing import Exact, assert_close

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import counted_search

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

HEAD_DIM_V = 512
KEYS_PER_SPLIT = 256
PROGRAMS = 4  # of the stock kernel, for each compute unit
EFFORT = Effort(rounds=3, rest_s=0.02)
BYTES_ALONE = "no GPU: bytes over the memory rate, in clocks; which is faster needs a GPU;"
HEADER = ("tokens", "heads", "splits", "runner", "unit", "latency", "gb_per_s", "partial_tiles", "of_first")
RUNNERS = ("stock", "stock_uniform", "ours", "general", "triton", "torch", "torch_compiled", "stream")


class Maps(NamedTuple):
    """The lists of AITER's planner for its reduction: entries of each tile, its query tokens, rows of partials."""

    indptr: torch.Tensor  # [tiles + 1]
    final: torch.Tensor  # [tiles, 2]
    partial: torch.Tensor  # [entries]
    rows: int  # of the partial tensors

    @property
    def merged(self) -> int:
        """Partial tiles that are read: those of tiles with more than one."""
        counts = self.indptr.diff()
        return int(counts[counts > 1].sum())

    @property
    def tiles(self) -> int:
        """Tiles that are merged."""
        return int((self.indptr.diff() > 1).sum())


def uniform_maps(tokens: int, splits: int, device: torch.device) -> Maps:
    index: dict[str, Any] = dict(dtype=torch.int32, device=device)
    first = torch.arange(tokens, **index)
    entries = torch.arange(tokens * splits, **index)
    return Maps(torch.arange(tokens + 1, **index) * splits, torch.stack((first, first + 1), 1), entries, len(entries))


def planned_maps(tokens: int, heads: int, splits: int, units: int, device: torch.device) -> Maps:
    """The lists of the plan for `tokens` sequences of splits x KEYS_PER_SPLIT keys over the device's units."""
    index: dict[str, Any] = dict(dtype=torch.int32, device=device)
    keys = splits * KEYS_PER_SPLIT
    lens = torch.full((tokens,), keys, **index)
    queries = torch.arange(tokens + 1, **index)
    plan = mla_suite.plan(lens, queries, num_heads=heads, max_seqlen_q=1, max_seqlen_kv=keys, num_sm_parts=units)
    made = metadata_convert.to_aiter(plan, queries, queries * keys, num_sm_parts=units, page_size=1, max_seqlen_q=1)
    return Maps(made.reduce_indptr, made.reduce_final_map, made.reduce_partial_map, tokens + units)


class Turn(NamedTuple):
    """Inputs and outputs of one reduction."""

    partial_out: torch.Tensor  # [rows, heads, HEAD_DIM_V]
    partial_lse: torch.Tensor  # [rows, heads]
    out: torch.Tensor
    lse: torch.Tensor


def turn_of(rows: int, tokens: int, heads: int, device: torch.device) -> Turn:
    draw = torch.Generator(device).manual_seed(rows)
    partial_lse = torch.randn(rows, heads, generator=draw, device=device) * 3
    return Turn(
        torch.randn(rows, heads, HEAD_DIM_V, generator=draw, device=device),
        partial_lse,
        torch.full((tokens, heads, HEAD_DIM_V), torch.nan, dtype=torch.bfloat16, device=device),
        torch.full((tokens, heads), torch.nan, device=device),
    )


@cache
def stock_kernel() -> Any:
    """The restated stock reduction; made at its first use, since Triton is optional."""

    @triton.jit(do_not_specialize=["tiles"])
    def kernel(partial_out, partial_lse, indptr, final, partial, out, lse, tiles, HEADS: tl.constexpr, D: tl.constexpr):
        column = tl.arange(0, D)
        for work in range(tl.program_id(0), tiles * HEADS, tl.num_programs(0)):
            tile, head = work // HEADS, work % HEADS
            first, end = tl.load(indptr + tile), tl.load(indptr + tile + 1)
            if end - first > 1:  # fewer were written where they belong
                begin, stop = tl.load(final + 2 * tile), tl.load(final + 2 * tile + 1)
                for token in range(begin, stop):
                    largest = -float("inf")
                    total = 0.0
                    merged = tl.zeros([D], tl.float32)
                    for entry in range(first, end):
                        row = (tl.load(partial + entry) + token - begin).to(tl.int64) * HEADS + head
                        one = tl.load(partial_lse + row)
                        now = tl.maximum(largest, one)
                        base = tl.where(now == -float("inf"), 0.0, now)
                        before, weight = tl.exp(largest - base), tl.exp(one - base)
                        merged = merged * before + weight * tl.load(partial_out + row * D + column)
                        total = total * before + weight
                        largest = now
                    place = (token - begin + begin.to(tl.int64)) * HEADS + head
                    result = tl.where(total > 0.0, merged / total, 0.0)
                    tl.store(out + place * D + column, result.to(out.dtype.element_ty))
                    tl.store(lse + place, largest + tl.log(total))

    return kernel


def run_stock(turn: Turn, maps: Maps, units: int) -> None:
    heads, tiles = turn.lse.shape[1], maps.indptr.shape[0] - 1
    grid = (min(PROGRAMS * units, tiles * heads),)
    tensors = turn.partial_out, turn.partial_lse, *maps[:3], turn.out, turn.lse
    stock_kernel()[grid](*tensors, tiles, HEADS=heads, D=HEAD_DIM_V, num_warps=4)


def run_ours(turn: Turn, splits: int) -> None:
    torch.ops.mla_suite.combine.out(
        turn.partial_out,
        turn.partial_lse,
        num_splits=splits,
        out_dtype=turn.out.dtype,
        out=turn.out,
        lse=turn.lse,
    )


def run_backend(name: str, config: Any, turn: Turn, splits: int) -> None:
    (backend,) = (each for each in COMBINE.backends if each.name == name)
    arguments = CombineArgs(turn.partial_out, turn.partial_lse, num_splits=splits)
    backend.run(config, (turn.out, turn.lse), arguments)


def in_torch(partial_out: torch.Tensor, partial_lse: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    lse = partial_lse.unflatten(0, (-1, splits))
    weights = torch.softmax(lse, dim=1)
    out = (weights.unsqueeze(-1) * partial_out.unflatten(0, (-1, splits))).sum(1)
    return out.bfloat16(), torch.logsumexp(lse, dim=1)


@cache
def stream_kernel() -> Any:
    """Reads what combine reads of partial_out and writes what it writes of out."""

    @triton.jit
    def kernel(partial_out, out, splits, per_token, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        first = at // per_token * splits * per_token + at % per_token
        total = tl.zeros([BLOCK], tl.float32)
        for split in range(splits):
            total += tl.load(partial_out + first + split * per_token)
        tl.store(out + at, total.to(tl.bfloat16))

    return kernel


def run_stream(turn: Turn, splits: int) -> None:
    values = turn.out.numel()
    grid = (values // 1024,)
    stream_kernel()[grid](turn.partial_out, turn.out, splits, values // turn.out.shape[0], BLOCK=1024)


class Runner(NamedTuple):
    """The maps of a way to reduce, the call, and whether it leaves combine's result in a turn's outputs."""

    maps: Maps
    call: Callable[[Turn], object]
    combines: bool = True


def runners(tokens: int, heads: int, splits: int, units: int, device: torch.device) -> dict[str, Runner]:
    """Those of RUNNERS that there are on this device."""
    own, planned = uniform_maps(tokens, splits, device), planned_maps(tokens, heads, splits, units, device)
    compiled = torch.compile(in_torch, dynamic=False)
    found = {
        "stock": Runner(planned, lambda turn: run_stock(turn, planned, units)),
        "stock_uniform": Runner(own, lambda turn: run_stock(turn, own, units)),
        "ours": Runner(own, partial(run_ours, splits=splits)),
        "triton": Runner(own, lambda turn: run_backend("triton", None, turn, splits)),
        "torch": Runner(own, lambda turn: in_torch(*turn[:2], splits), False),
        "torch_compiled": Runner(own, lambda turn: compiled(*turn[:2], splits), False),
        "stream": Runner(own, partial(run_stream, splits=splits), False),
    }
    if (arch := dispatch.arch_of(own.indptr)) is not None:
        fixed = combine_config.invariant(arch, HEAD_DIM_V, tokens * heads)
        found["general"] = Runner(own, lambda turn: run_backend("native", fixed, turn, splits))
    return found


def check(turn: Turn, maps: Maps) -> None:
    """Compare what the maps say is merged with fp64. AssertionError where it is off, or a tile was left out."""
    bounds, wanted = maps.indptr.tolist(), maps.indptr.diff() > 1
    found = []
    for tile in wanted.nonzero().flatten().tolist():
        rows = maps.partial[bounds[tile] : bounds[tile + 1]].long()
        found.append(counted_search.exact(turn.partial_out[rows], turn.partial_lse[rows]))
    exact = Exact(*(torch.stack(parts).cpu() for parts in zip(*found, strict=True)))
    token = maps.final[:, 0][wanted].long()
    assert_close(turn.out[token].cpu(), turn.lse[token].cpu(), exact)


def moved(merged: int, tiles: int, heads: int) -> int:
    """Bytes that must be read and written."""
    return heads * (merged * (HEAD_DIM_V + 1) * 4 + tiles * (HEAD_DIM_V * 2 + 4))


Shape = tuple[int, int, int]
Line = tuple[str, str, float, float | str, int, float | str]
"""One runner on one shape: the cells of HEADER behind the shape's. Latency is in microseconds on a GPU, else the clocks
in which its bytes can be moved."""


def timed(shape: Shape, names: list[str], cold: bool, device: torch.device) -> Iterator[Line]:
    """Times on this GPU."""
    tokens, heads, _ = shape
    units = torch.cuda.get_device_properties(device).multi_processor_count
    found, first_us = runners(*shape, units, device), 0.0
    for name in names:
        maps, call, combines = found[name]
        count = min(cold_turns(moved(maps.rows, tokens, heads), device), 64) if cold else 1
        turns = [turn_of(maps.rows, tokens, heads, device) for _ in range(count)]
        call(turns[0])
        if combines and maps.tiles:
            check(turns[0], maps)
        us = median(device_rounds(call, turns, EFFORT))
        first_us = first_us or us
        yield name, "us", us, moved(maps.merged, maps.tiles, heads) / us / 1e3, maps.merged, us / first_us


def counted(shape: Shape, arch: ArchSpec) -> Iterator[Line]:
    """Clocks in which an AMD arch can move the bytes of each: the stock reduction's least, ours as executed."""
    tokens, heads, splits = shape
    cpu, name = torch.device("cpu"), arch.name
    rate = arch.memory_bytes_per_s / (arch.clock_mhz * 1e6)
    own, planned = uniform_maps(tokens, splits, cpu), planned_maps(tokens, heads, splits, arch.compute_units, cpu)
    for runner, maps in (("stock bytes", planned), ("stock_uniform bytes", own)):
        yield f"{name} {runner}", "clocks", moved(maps.merged, maps.tiles, heads) / rate, "", maps.merged, ""
    with emulate(name):
        problem = CombineProblem(tokens, heads, HEAD_DIM_V, splits, torch.bfloat16, False, tokens * splits)
        point, _ = combine_config.choose(problem, arch)
        clocks = counted_search.bound(point, tokens * heads, splits)["memory"]
    yield f"{name} ours bytes", "clocks", clocks, "", own.merged, ""


def size(text: str) -> Shape:
    tokens, heads, splits = map(positive, text.split("x"))
    return tokens, heads, splits


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=writable, metavar="FILE", help="write the rows to this file as they come")
    parser.add_argument("--shapes", nargs="+", metavar="PART", help="only shapes whose names contain one of these")
    sizes = "tokens x heads x splits between commas, instead of the published grid"
    parser.add_argument("--sizes", type=lambda text: [size(part) for part in text.split(",")], help=sizes)
    parser.add_argument("--runners", default=",".join(RUNNERS[:3]), help=f"of {', '.join(RUNNERS)}")
    parser.add_argument("--cold", action="store_true", help="partials from device memory, on a GPU")
    counted_for = "AMD archs to count for without a GPU"
    parser.add_argument("--arch", type=each_emulated, default="gfx942,gfx950", help=counted_for)
    given = parser.parse_args(arguments)
    wanted = given.runners.split(",")
    if unknown := set(wanted) - set(RUNNERS):
        parser.error(f"no runner {', '.join(sorted(unknown))}; there are {', '.join(RUNNERS)}")
    try:
        cases = sets.matching({case.id: case for case in sets.named("aiter-3468")}, given.shapes)
        table = Table(given.csv, shown=HEADER)
    except UsageError as error:
        parser.error(str(error))
    on_gpu = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if on_gpu else BYTES_ALONE, "torch", torch.__version__)
    for shape in given.sizes or [(case.facts["batch"], case.facts["heads"], case.facts["splits"]) for case in cases]:
        gpu = torch.device("cuda")
        found = [timed(shape, wanted, given.cold, gpu)] if on_gpu else [counted(shape, arch) for arch in given.arch]
        for line in chain(*found):
            table.add(dict(zip(HEADER, (*shape, *line), strict=True)))


if __name__ == "__main__":
    main()
