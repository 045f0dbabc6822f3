"""Cost of tensor, context and data parallel attention per layer and step on 1 to 1,024 GPUs, by arithmetic.

    python benchmarks/scale_tables.py           the tables of docs/scale.md, made from this model and what was measured

A layer's time is a fixed cost, the bytes of its weights over the memory's rate, its attention (bytes over the memory's
rate, or operations over the part of the matrix rate that decode reaches, whichever is longer) and its collectives. A
collective inside a node is a line in the number of ranks and in the bytes that it sends. The fixed costs and the part
are fitted to the rows of one H200, the lines to the collectives of two and four. No row of a layer or context over
several GPUs is fitted to, so these rows check the model. Nothing here runs on a GPU.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mla_suite.distributed.peer_memory import TOTAL_SLICE_BYTES, sums_in_two

HIDDEN, HEADS, D_QK, D_V, TOKEN_BYTES, LAYERS = 7168, 128, 576, 512, 1152, 61  # DeepSeek V3 in bf16
DOWN_BYTES = 2 * 2112 * HIDDEN  # the two down-projections, which every rank has whole
HEAD_BYTES = 2 * (24576 * 1536 + 512 * HEADS * 256 + HIDDEN * HEADS * 128)  # projections that split by heads
KINDS = {"sum": 2 * HIDDEN, "gather": 2 * HEADS * D_QK, "merge": HEADS * (2 * D_V + 4)}  # bytes of a token, all ranks'
NODE = 8  # GPUs that reach each other's memory
# An H200: what it reads and multiplies as measured, and NVLink 4 as published, bytes/s in one direction.
READS, MULTIPLIES, NVLINK = 4.6e12, 790e12, 450e9


def saved(run: str) -> list[dict[str, str]]:
    """The rows of a run of bench_distributed.py."""
    lines = (Path(__file__).parent / "results" / "distributed" / run).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


class Row(NamedTuple):
    """A measured row: its kind, its sizes, how it was spread and its columns of microseconds."""

    kind: str  # sum, gather, merge: tokens; layer: batch, kv_len; decode: q_len, kv_len
    sizes: tuple[int, ...]
    split: dict[str, int]  # tp, cp and dp, those above 1
    us: dict[str, float]
    what: str

    @classmethod
    def read(cls, row: dict[str, str], ranks: int) -> Row:
        kind = row["what"].split()[0]
        numbers = [int(number) for number in re.findall(r"(?<![^ B])\d+", row["what"])]
        sizes = {"layer": numbers, "decode": numbers[1:]}.get(kind, numbers[:1])
        # The first run on two GPUs had one way for each kind, and no column of ways.
        split = row.get("split") or {"layer": f"TP{ranks}", "decode": f"CP{ranks}"}.get(kind, "")
        ways = {part[:2].lower(): int(part[2:]) for part in split.split(" x ") if part}
        us = {name: float(value) for name, value in row.items() if name.endswith("_us") and value}
        return cls(kind, tuple(sizes), ways, us, row["what"])


def rows(run: str, ranks: int) -> list[Row]:
    return [Row.read(row, ranks) for row in saved(run)]


RUNS = {2: rows("h200x2.csv", 2), 4: rows("h200x4.csv", 4)}  # of H200s, by their number


def fitted(terms: list[list[float]], took: list[float], known: list[float] | None = None) -> list[float]:
    """Factors of the terms that, with what is known, leave the least sum of squared relative errors."""
    measured = np.array(took)
    rest = measured - np.array(known or [0.0] * len(took))
    return [
        float(each) for each in np.linalg.lstsq(np.array(terms) / measured[:, None], rest / measured, rcond=None)[0]
    ]


def sent(kind: str, tokens: float, ranks: int, way: str) -> float:
    """Bytes that the time of a collective of `tokens` query tokens grows with: through peer memory what a rank sends.

    way  "one" or "two" exchanges through peer memory, or "nccl"
    """
    whole, part = tokens * KINDS[kind], tokens * KINDS[kind] * (ranks - 1) / ranks
    if way == "nccl" and kind != "gather":
        return whole  # 128 tokens took as long over four GPUs as over two, or 9 % longer, not 1.5 times as a ring would
    if kind != "sum":
        return part
    return {"one": ranks * part, "two": 2 * part}[way]


@dataclass(frozen=True)
class Line:
    """Seconds of a collective: what two ranks wait, every rank more, a second exchange, and a byte sent."""

    two_ranks: float
    further_rank: float
    per_byte: float
    second_exchange: float = 0.0

    @classmethod
    def through(cls, kind: str, *, nccl: bool) -> Line:
        """The line of the least squares of relative errors, over the measured rows of a kind."""
        terms, took = [], []
        for ranks, row, way, us in measured_collectives(kind, nccl=nccl):
            second = [float(way == "two")] if kind == "sum" and not nccl else []
            terms.append([1.0, ranks - 2.0, sent(kind, row.sizes[0], ranks, way) / 1e6, *second])
            took.append(us)
        two, further, megabyte, *more = fitted(terms, took)
        return cls(two * 1e-6, further * 1e-6, megabyte * 1e-12, *(us * 1e-6 for us in more))

    def seconds(self, ranks: int, sent_bytes: float, way: str, slower: float = 1.0) -> float:
        waits = self.two_ranks + self.further_rank * (ranks - 2) + (self.second_exchange if way == "two" else 0.0)
        return waits + sent_bytes * self.per_byte * slower


def measured_collectives(kind: str, *, nccl: bool) -> Iterator[tuple[int, Row, str, float]]:
    """Every time of a kind: its ranks, row and way, and the microseconds; sums over four GPUs both ways."""
    for ranks, run in RUNS.items():
        for row in (row for row in run if row.kind == kind):
            if nccl:
                yield ranks, row, "nccl", row.us["nccl_us"]
            elif "in_one_us" in row.us:
                yield from ((ranks, row, way, row.us[f"in_{way}_us"]) for way in ("one", "two"))
            else:
                yield ranks, row, "one", row.us["many_us"]


PEER_MEMORY = {kind: Line.through(kind, nccl=False) for kind in KINDS}
NCCL = {kind: Line.through(kind, nccl=True) for kind in KINDS}


def multiplied(tokens: float, heads: float, keys: float, rate: float) -> float:
    """Seconds of the products of `tokens` query tokens with `keys` keys and values."""
    return 2 * tokens * heads * keys * (D_QK + D_V) / rate


def one_gpu() -> Iterator[tuple[Row, bool, float]]:
    """Every time of one H200: a row whose sizes are what that GPU had, whether it is a layer, and the microseconds."""
    for ranks, run in RUNS.items():
        layers = {row.what: row for row in run if row.kind == "layer"}  # one time for all ways
        yield from ((row, True, row.us["one_us"]) for row in layers.values())
        for row in (row for row in run if row.kind == "decode"):
            yield row, False, row.us["one_us"]
            if "own_keys_us" in row.us:
                q_len, kv_len = row.sizes
                yield row._replace(sizes=(q_len, kv_len // ranks)), False, row.us["own_keys_us"]


def fixed_and_reached() -> tuple[float, float, float]:
    """Seconds that a layer takes beside its bytes and products, the same of decode, and the part of the matrix rate."""
    found = list(one_gpu())
    terms = [[float(layer), float(not layer), 1e6 * multiplied(row.sizes[0], HEADS, row.sizes[1], MULTIPLIES)]
             for row, layer, _ in found]  # fmt: skip
    weights = [1e6 * (DOWN_BYTES + HEAD_BYTES) / READS * layer for _, layer, _ in found]
    layer, decode, slowdown = fitted(terms, [us for *_, us in found], weights)
    return layer * 1e-6, decode * 1e-6, 1 / slowdown


LAYER, DECODE, REACHED = fixed_and_reached()


@dataclass(frozen=True)
class Machine:
    """One kind of GPU and its links. Rates in bytes/s and FLOP/s, times in seconds."""

    name: str
    memory: float
    matrix: float
    link: float  # per GPU and direction, inside a node
    link_to_peer: float  # the part of it that leads to one other GPU
    network: float = 50e9  # per GPU and direction, between nodes
    network_latency: float = 20e-6  # of a collective
    peer_memory: bool = True
    layer: float = LAYER  # beside weights and attention: launches, norms, small products, caches that begin empty
    decode: float = DECODE  # the same of attention by itself
    reached: float = REACHED  # part of the matrix rate

    def collective(self, kind: str, tokens: float, ranks: int, way: str = "") -> float:
        """Seconds of a collective of `tokens` query tokens over `ranks` GPUs; by default the way that it takes."""
        if ranks == 1:
            return 0.0
        whole = tokens * KINDS[kind]
        if not way and (not self.peer_memory or ranks > NODE or whole > TOTAL_SLICE_BYTES):
            way = "nccl"
        elif not way:
            in_two = kind == "sum" and sums_in_two(int(whole), ranks, TOTAL_SLICE_BYTES // ranks)
            way = "two" if in_two else "one"
        if ranks > NODE:
            return self.network_latency + (2 if kind == "sum" else 1) * whole * (ranks - 1) / ranks / self.network
        line = (NCCL if way == "nccl" else PEER_MEMORY)[kind]
        slower = NVLINK / min(self.link, self.link_to_peer * (ranks - 1))
        return line.seconds(ranks, sent(kind, tokens, ranks, way), way, slower)

    def attention(self, tokens: float, heads: float, keys: float, sequences: float) -> float:
        """Seconds of `tokens` query tokens over `keys` keys in each of `sequences` sequences."""
        products = multiplied(tokens, heads, keys, self.matrix * self.reached)
        return max(sequences * keys * TOKEN_BYTES / self.memory, products)


# H200: rates measured here, NVLink 4 and NDR InfiniBand as published (450 and 50 GB/s a direction). MI300X and MI355X:
# as published (7 links of 64 and 76.8 GB/s a direction, one to each other GPU); what is fitted to the H200 is assumed
# of them too: fixed costs and latencies, and the parts of the matrix and link rates that are reached.
H200 = Machine("H200", READS, MULTIPLIES, NVLINK, NVLINK)
OVER_NCCL = replace(H200, peer_memory=False)
H100 = replace(H200, name="H100", memory=3.1e12)  # its HBM3; the links are the H200's
MACHINES = (
    H200,
    Machine("MI300X", 5.3e12, 1307e12, 7 * 64e9, 64e9),
    Machine("MI355X", 8.0e12, 2500e12, 7 * 76.8e9, 76.8e9),
)


def layer(machine: Machine, batch: int, kv_len: int, *, tp: int = 1, cp: int = 1, dp: int = 1) -> float:
    """Seconds of a layer whose heads are split tp times, keys cp times and sequences dp times.

    The hidden states are summed over tp x cp ranks; a group of cp ranks gathers queries and merges partial results of
    its 1 / tp of the heads, which are as many bytes as 1 / tp of the tokens with all heads.
    """
    own = -(-batch // dp)
    weights = (DOWN_BYTES + HEAD_BYTES / (tp * cp)) / machine.memory
    exchanged = machine.collective("sum", own, tp * cp) + sum(
        machine.collective(kind, own / tp, cp) for kind in ("gather", "merge")
    )
    return machine.layer + weights + machine.attention(own, HEADS / tp, kv_len / cp, own) + exchanged


def context_decode(machine: Machine, q_len: int, kv_len: int, *, cp: int = 1) -> float:
    """Attention of one sequence and its merge, without a layer around them."""
    return machine.decode + machine.attention(q_len, HEADS, kv_len / cp, 1) + machine.collective("merge", q_len, cp)


def modelled(row: Row, machine: Machine, ranks: int) -> float:
    """Seconds of a row over so many ranks as it says, or on one GPU."""
    if row.kind in KINDS:
        return machine.collective(row.kind, row.sizes[0], ranks)
    split = row.split if ranks > 1 else {}
    return (layer if row.kind == "layer" else context_decode)(machine, *row.sizes, **split)


WAYS: dict[str, Callable[[int], dict[str, int]]] = {
    "TP": lambda ranks: {"tp": ranks},
    "CP": lambda ranks: {"cp": ranks},
    "DP": lambda ranks: {"dp": ranks},
    "CP in a node x DP": lambda ranks: {"cp": min(ranks, NODE), "dp": max(1, ranks // NODE)},
}
