"""Cost of tensor, context and data parallel attention per layer and step on 1 to 1,024 GPUs, by arithmetic.

    python benchmarks/scale_model.py            the tables of docs/scale.md

A time is a floor: bytes over memory bandwidth or operations over the matrix rate, whichever is longer, plus
collectives, each a latency and bytes over the link. Kernels reach 0.7 to 0.9 of it. Nothing here runs on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN, HEADS, D_QK, D_V, TOKEN_BYTES, LAYERS = 7168, 128, 576, 512, 1152, 61  # DeepSeek V3 in bf16
MEMORY = 1e11  # bytes of a GPU for the cache of all layers; where it does not fit, no time is given
DOWN_BYTES = 2 * 2112 * HIDDEN  # the two down-projections, which every rank has whole
HEAD_BYTES = 2 * (24576 * 1536 + 512 * HEADS * 256 + HIDDEN * HEADS * 128)  # projections that split by heads


@dataclass(frozen=True)
class Machine:
    """One kind of GPU and its links. Rates in bytes/s and FLOP/s, latency in seconds per collective."""

    name: str
    memory: float
    matrix: float
    link: float  # per GPU and direction, inside a node
    network: float  # per GPU and direction, between nodes
    link_latency: float
    network_latency: float
    node: int = 8

    def collective(self, sent: float, ranks: int) -> float:
        """Seconds of a collective in which each rank sends `sent` bytes."""
        if ranks == 1:
            return 0.0
        inside = ranks <= self.node
        rate, latency = (self.link, self.link_latency) if inside else (self.network, self.network_latency)
        return latency + sent / rate

    def work(self, read: float, operations: float) -> float:
        return max(read / self.memory, operations / self.matrix)


# H200: rates and the link's latency measured here, NVLink 4 and NDR InfiniBand as published (450 and 50 GB/s a
# direction). MI300X and MI355X: as published (7 links of 64 and 76.8 GB/s a direction); latencies are assumed alike.
MACHINES = (
    Machine("H200", 4.6e12, 790e12, 450e9, 50e9, 9e-6, 20e-6),
    Machine("MI300X", 5.3e12, 1307e12, 448e9, 50e9, 9e-6, 20e-6),
    Machine("MI355X", 8.0e12, 2500e12, 538e9, 50e9, 9e-6, 20e-6),
)


def operations(batch: float, heads: float, kv_len: float) -> float:
    return 2 * batch * heads * kv_len * (D_QK + D_V)


def tensor_parallel(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Heads split; every rank reads all latents. One all-reduce of the hidden states."""
    projections = (DOWN_BYTES + HEAD_BYTES / ranks) / machine.memory
    attention = machine.work(batch * kv_len * TOKEN_BYTES, operations(batch, HEADS / ranks, kv_len))
    return projections + attention + machine.collective(2 * 2 * batch * HIDDEN * (ranks - 1) / ranks, ranks)


def context_parallel(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Keys and weights split; queries are gathered, partial results exchanged, hidden states summed."""
    projections = (DOWN_BYTES + HEAD_BYTES / ranks) / machine.memory
    attention = machine.work(batch * kv_len / ranks * TOKEN_BYTES, operations(batch, HEADS, kv_len / ranks))
    share = (ranks - 1) / ranks
    queries = machine.collective(2 * batch * HEADS * D_QK * share, ranks)
    partials = machine.collective(2 * batch * HEADS * (D_V + 2) * share, ranks)
    return projections + attention + queries + partials + machine.collective(4 * batch * HIDDEN * share, ranks)


def data_parallel(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Sequences split, weights whole on every rank; no collective in attention."""
    own = -(-batch // ranks)
    attention = machine.work(own * kv_len * TOKEN_BYTES, operations(own, HEADS, kv_len))
    return (DOWN_BYTES + HEAD_BYTES) / machine.memory + attention


def hybrid(machine: Machine, ranks: int, batch: int, kv_len: int) -> float:
    """Context parallel inside a node, data parallel over the nodes."""
    nodes = max(1, ranks // machine.node)
    return context_parallel(machine, min(ranks, machine.node), -(-batch // nodes), kv_len)


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


if __name__ == "__main__":
    print("\n\n".join(table(machine) for machine in MACHINES))
