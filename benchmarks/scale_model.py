"""Cost of tensor, context and data parallel attention per layer and step on 1 to 1,024 GPUs, by arithmetic.

    python benchmarks/scale_model.py            the tables of docs/scale.md

A time is bytes over memory bandwidth or operations over the matrix rate, whichever is longer, which is a floor, plus
collectives. A collective inside a node costs what was measured on two H200s: a line through the rows of its kind, one
for peer memory and one for NCCL. Nothing here runs on a GPU.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from mla_suite.distributed.peer_memory import SECOND_EXCHANGE_BYTES, TOTAL_SLICE_BYTES, sums_in_two

HIDDEN, HEADS, D_QK, D_V, TOKEN_BYTES, LAYERS = 7168, 128, 576, 512, 1152, 61  # DeepSeek V3 in bf16
MEMORY = 1e11  # bytes of a GPU for the cache of all layers; where it does not fit, no time is given
DOWN_BYTES = 2 * 2112 * HIDDEN  # the two down-projections, which every rank has whole
HEAD_BYTES = 2 * (24576 * 1536 + 512 * HEADS * 256 + HIDDEN * HEADS * 128)  # projections that split by heads
KINDS = {"sum": 2 * HIDDEN, "gather": 2 * HEADS * D_QK, "merge": HEADS * (2 * D_V + 4)}  # bytes of a token, all ranks'
NVLINK = 450e9  # bytes/s of an H200 in one direction, on which the lines below were measured


def saved(run: str) -> list[dict[str, str]]:
    """The rows of a run of bench_distributed.py."""
    lines = (Path(__file__).parent / "results" / "distributed" / run).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


MEASURED = {row["what"]: row for row in saved("h200x2.csv")}


@dataclass(frozen=True)
class Line:
    """Seconds of a collective: latency + sent bytes * per_byte."""

    latency: float
    per_byte: float

    @classmethod
    def through(cls, kind: str, column: str) -> Line:
        """The line that leaves the least sum of squared relative errors over the measured rows of a kind."""
        rows = [row for what, row in MEASURED.items() if what.startswith(f"{kind} ")]
        sent, took = ([float(row[name]) for row in rows] for name in ("sent_bytes", column))
        weights = [us**-2 for us in took]
        sent_mean, took_mean = (
            sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights) for values in (sent, took)
        )
        spread = [
            (w * (x - sent_mean), x - sent_mean, y - took_mean) for w, x, y in zip(weights, sent, took, strict=True)
        ]
        slope = sum(w * y for w, _, y in spread) / sum(w * x for w, x, _ in spread)
        return cls((took_mean - slope * sent_mean) * 1e-6, slope * 1e-6)


PEER_MEMORY = {kind: Line.through(kind, "many_us") for kind in KINDS}
NCCL = {kind: Line.through(kind, "nccl_us") for kind in KINDS}


@dataclass(frozen=True)
class Machine:
    """One kind of GPU and its links. Rates in bytes/s and FLOP/s, latency in seconds per collective."""

    name: str
    memory: float
    matrix: float
    link: float  # per GPU and direction, inside a node
    link_to_peer: float  # the part of it that leads to one other GPU
    network: float = 50e9  # per GPU and direction, between nodes
    network_latency: float = 20e-6
    node: int = 8
    peer_memory: bool = True

    def collective(self, kind: str, tokens: float, ranks: int) -> float:
        """Seconds of a collective of `tokens` query tokens over `ranks` GPUs."""
        if ranks == 1:
            return 0.0
        whole = tokens * KINDS[kind]
        through_peers = self.peer_memory and ranks <= self.node and whole <= TOTAL_SLICE_BYTES
        in_two = kind == "sum" and sums_in_two(int(whole), ranks, TOTAL_SLICE_BYTES // ranks)
        # In one exchange peers each get the whole summand; NCCL's ring passes parts on, twice around.
        copies = {"sum": ranks if through_peers and not in_two else 2}.get(kind, 1)
        sent = whole * copies * (ranks - 1) / ranks
        if ranks > self.node:
            return self.network_latency + sent / self.network
        line = (PEER_MEMORY if through_peers else NCCL)[kind]
        waiting = line.latency + (SECOND_EXCHANGE_BYTES * line.per_byte if through_peers and in_two else 0.0)
        return waiting + sent * line.per_byte * NVLINK / min(self.link, self.link_to_peer * (ranks - 1))

    def attention(self, tokens: float, heads: float, keys: float, sequences: float) -> float:
        """Seconds of `tokens` query tokens over `keys` keys in each of `sequences` sequences."""
        operations = 2 * tokens * heads * keys * (D_QK + D_V)
        return max(sequences * keys * TOKEN_BYTES / self.memory, operations / self.matrix)

    def projections(self, ranks: int) -> float:
        return (DOWN_BYTES + HEAD_BYTES / ranks) / self.memory


# H200: rates measured here, NVLink 4 and NDR InfiniBand as published (450 and 50 GB/s a direction). MI300X and MI355X:
# as published (7 links of 64 and 76.8 GB/s a direction, one to each other GPU); their collectives are assumed to have
# the H200's latencies and to reach the same part of the link's rate.
H200 = Machine("H200", 4.6e12, 790e12, NVLINK, NVLINK)
OVER_NCCL = replace(H200, peer_memory=False)
H100 = replace(H200, name="H100", memory=3.1e12)  # its HBM3; the links are the H200's
MACHINES = (
    H200,
    Machine("MI300X", 5.3e12, 1307e12, 7 * 64e9, 64e9),
    Machine("MI355X", 8.0e12, 2500e12, 7 * 76.8e9, 76.8e9),
)


def tensor_parallel(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Heads split; every rank reads all latents. One sum of the hidden states."""
    attention = machine.attention(batch, HEADS / ranks, kv_len, batch)
    return machine.projections(ranks) + attention + machine.collective("sum", batch, ranks)


def context_parallel(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Keys and weights split; queries are gathered, partial results merged, hidden states summed."""
    attention = machine.attention(batch, HEADS, kv_len / ranks, batch)
    exchanged = sum(machine.collective(kind, batch, ranks) for kind in KINDS)
    return machine.projections(ranks) + attention + exchanged


def data_parallel(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Sequences split, weights whole on every rank; no collective in attention."""
    own = -(-batch // ranks)
    return machine.projections(1) + machine.attention(own, HEADS, kv_len, own)


def hybrid(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Context parallel inside a node, data parallel over the nodes."""
    nodes = max(1, ranks // machine.node)
    return context_parallel(machine, min(ranks, machine.node), -(-batch // nodes), kv_len)


def context_decode(machine: Machine, ranks: int, q_len: int, kv_len: int) -> float:
    """Attention of one sequence and its merge, without a layer around them."""
    return machine.attention(q_len, HEADS, kv_len / ranks, 1) + machine.collective("merge", q_len, ranks)


WAYS = {"TP": tensor_parallel, "CP": context_parallel, "DP": data_parallel, "CP in a node x DP": hybrid}
CASES = ((128, 4096), (8192, 4096), (1024, 131_072), (1, 1_048_576))
RANKS = (1, 2, 8, 64, 1024)


def table(machine: Machine) -> str:
    lines = [
        f"| {machine.name}: batch x kv | way | " + " | ".join(f"{ranks} GPUs" for ranks in RANKS) + " |",
        "|---|---|" + "---:|" * len(RANKS),
    ]
    for batch, kv_len in CASES:
        for name, way in WAYS.items():
            cells = []
            for ranks in RANKS:
                # Heads split no further than they are many, sequences likewise.
                most = {"DP": batch, "CP in a node x DP": batch * machine.node}.get(name, HEADS)
                held = batch * kv_len * TOKEN_BYTES * LAYERS / (1 if name == "TP" else ranks)
                possible = ranks <= most and held <= MEMORY
                cells.append(f"{way(machine, ranks, batch, kv_len) * 1e6:,.0f}" if possible else "-")
            lines.append(f"| {batch} x {kv_len:,} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compared(found: str, modelled: float) -> str:
    """Cells: a measured time, the model's and the model's error."""
    us = float(found)
    return f"{us:.1f} | {modelled * 1e6:.1f} | {(modelled * 1e6 / us - 1) * 100:+.0f} %"


def collectives() -> str:
    """The collectives of two H200s: measured, and on their lines."""
    lines = [
        "| collective, tokens | sent, kB | peer memory, us | model | error | NCCL, us | model | error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    names = {"sum": "sum of hidden states", "gather": "gather of queries", "merge": "merge of partial results"}
    for kind, name in names.items():
        for what, row in MEASURED.items():
            if what.startswith(f"{kind} "):
                tokens = int(what.split()[1])
                peers = compared(row["many_us"], H200.collective(kind, tokens, 2))
                nccl = compared(row["nccl_us"], OVER_NCCL.collective(kind, tokens, 2))
                lines.append(f"| {name}, {tokens} | {int(row['sent_bytes']) / 1e3:,.0f} | {peers} | {nccl} |")
    lines += ["", "| line | through peer memory | through NCCL |", "|---|---|---|"]
    for kind in names:
        cells = [
            f"{line.latency * 1e6:.1f} us, {1e-9 / line.per_byte:.0f} GB/s" for line in (PEER_MEMORY[kind], NCCL[kind])
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def layers() -> str:
    """Layers and attention of one and two H200s: measured, and by the model."""
    lines = [
        "| what | one GPU, us | model | error | two GPUs, us | model | error | NCCL, us | model | error | two / one |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    cases = {
        "layer B128 kv 512": ("TP layer, batch 128, 512 keys", tensor_parallel, 128, 512),
        "layer B128 kv 4096": ("TP layer, batch 128, 4,096 keys", tensor_parallel, 128, 4096),
        "decode B1 H128 q_len 1 kv 262144": ("CP decode, one sequence, 262,144 keys", context_decode, 1, 262_144),
        "decode B1 H128 q_len 4 kv 262144": ("the same with 4 query tokens", context_decode, 4, 262_144),
        "decode B1 H128 q_len 1 kv 1048576": ("CP decode, one sequence, 1,048,576 keys", context_decode, 1, 1_048_576),
    }
    for what, (name, way, tokens, kv_len) in cases.items():
        row = MEASURED[what]
        ways = (("one_us", H200, 1), ("many_us", H200, 2), ("nccl_us", OVER_NCCL, 2))
        cells = [compared(row[column], way(machine, ranks, tokens, kv_len)) for column, machine, ranks in ways]
        ratio = float(row["many_us"]) / float(row["one_us"])
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def every_way() -> str:
    """A layer over two H100s in every way, as a share of one H100's time: measured, and by the model."""
    rows = {(row["what"], row["split"]): row for row in saved("h100x2.csv")}
    lines = [
        "| layer | one GPU, us | TP | model | CP | model | DP | model |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for batch, kv_len in product((32, 128), (512, 4096, 32_768)):
        what = f"layer B{batch} kv {kv_len}"
        cells = [f"batch {batch}, {kv_len:,} keys", f"{float(rows[what, 'TP2']['one_us']):.0f}"]
        for name in ("TP", "CP", "DP"):
            row, way = rows[what, f"{name}2"], WAYS[name]
            share = float(row["many_us"]) / float(row["one_us"])
            cells += [f"{share:.2f}", f"{way(H100, 2, batch, kv_len) / way(H100, 1, batch, kv_len):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join([*(table(machine) for machine in MACHINES), layers(), collectives(), every_way()]))
