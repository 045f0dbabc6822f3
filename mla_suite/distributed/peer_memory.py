"""Exchange between GPUs of one host through memory that they all reach: one kernel per collective, no library's launch.

A step's collectives are small (0.1 to 2 MB), so latency decides, and a kernel that stores straight into the peers'
memory, waits for theirs and reduces takes less than copying, synchronising and reducing one after another. Calls of one
group run in one order on every rank and on one stream at a time; a captured graph may hold any number of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d

TOTAL_SLICE_BYTES = 18 << 20  # of a rank's slices together; 128 tokens of 128 heads over two ranks are 8.4 MB each
# What a GPU sends in the time of a second exchange. Over four H200s a sum of 32 tokens, which spares 688 kB, took as
# long in two exchanges as in one; of one token, 22 kB, 4.5 us longer; of 128, 2.8 MB, 4.9 us less (docs/scale.md).
SECOND_EXCHANGE_BYTES = 600_000
POLLS_PER_SECOND = 1 << 20  # a look at a flag takes about a microsecond
MAX_POLLS = 2**31 - 1
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

library = torch.library.Library("mla_suite_ranks", "DEF")
library.define("peer_sum(Tensor x, str group) -> Tensor", tags=TAGS)
library.define("peer_gather(Tensor x, int ranks, str group) -> Tensor", tags=TAGS)
library.define(
    "peer_merge(Tensor out, Tensor lse, Tensor? attn_sink, int own_heads, str group) -> (Tensor, Tensor)", tags=TAGS
)


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view of a group's memory.

    peers     int64 [ranks]: the address of every rank's buffer, as this rank reaches it
    rank      this rank in the group
    capacity  bytes that a rank may send to another in one call
    polls     looks at a flag until a rank that does not answer is an error: an assertion that ends the process
    programs  of every launch
    kernels   the module `peer_triton`, which needs triton, as torch's GPU builds alone bring it
    held      what keeps the memory alive
    """

    peers: torch.Tensor
    rank: int
    capacity: int
    polls: int
    programs: int
    kernels: Any
    held: Any = None

    @property
    def ranks(self) -> int:
        return self.peers.shape[0]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, made in fp32; the same bits on every rank."""
        out = torch.empty_like(x)
        if sums_in_two(x.numel() * x.element_size(), self.ranks, self.capacity):
            self._scattered_sum(x, out)
        else:
            self._reduce(x, out, gather=False)
        return out

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, [ranks, *x.shape]."""
        out = x.new_empty((self.ranks, *x.shape))
        self._reduce(x, out, gather=True)
        return out

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None, own_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges every rank's partial results, out [rows, heads, dim] and lse [rows, heads] fp32, as `combine` does.

        own_heads  heads / ranks: each rank gets its share of the heads; heads: every rank gets all
        attn_sink  [heads] fp32, or None

        -> merged [rows, own_heads, dim] in out's dtype, its lse [rows, own_heads]
        """
        rows, heads, dim = out.shape
        merged = out.new_empty((rows, own_heads, dim))
        merged_lse = lse.new_empty((rows, own_heads))
        items = rows * own_heads
        block = max(1, min(4096 // dim, _power_of_two(items, self.programs)))
        if items:
            self.kernels.merge_kernel[(self.programs,)](
                *(out, lse, attn_sink, merged, merged_lse, self.peers, self.rank, items, heads, own_heads),
                *(0 if own_heads == heads else own_heads, self.capacity, self.polls),
                WORLD=self.ranks,
                DIM=dim,
                BLOCK=block,
                num_warps=max(2, min(8, block * dim // 512)),
                **self.kernels.OPTIONS,
            )
        return merged, merged_lse

    def _scattered_sum(self, x: torch.Tensor, out: torch.Tensor) -> None:
        share = int(share_bytes(x.numel() * x.element_size(), self.ranks)) // x.element_size()
        self.kernels.scattered_sum_kernel[(self.programs,)](
            *(x, out, self.peers, self.rank, x.numel(), share, self.capacity, self.polls), **self._blocks_of(share)
        )

    def _reduce(self, x: torch.Tensor, out: torch.Tensor, *, gather: bool) -> None:
        values = x.numel()
        if values:
            self.kernels.reduce_kernel[(self.programs,)](
                *(x, out, self.peers, self.rank, values, self.capacity, self.polls),
                GATHER=gather,
                **self._blocks_of(values),
            )

    def _blocks_of(self, values: int) -> dict[str, Any]:
        """Constants of a kernel whose programs share out `values` values in blocks."""
        block = max(512, min(self.kernels.MAX_BLOCK, _power_of_two(values, self.programs)))
        return {"WORLD": self.ranks, "BLOCK": block, "num_warps": max(2, block // 1024), **self.kernels.OPTIONS}


_memories: dict[str, PeerMemory] = {}  # by the group's name, as torch keeps its groups
_capacities: dict[str, int] = {}


def connect(group: Any, timeout_s: float) -> None:
    """Gives a group memory that its ranks reach, where all are GPUs of one host that reach each other; else nothing.

    Every rank of the group must call this. From then on `serves` says yes to tensors that fit.
    """
    ranks = dist.get_process_group_ranks(_resolve(group))
    here = torch.cuda.current_device()
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == dist.get_world_size()
    others = [device for device in range(dist.get_world_size()) if device != here]
    from mla_suite.distributed import peer_triton  # where there is triton

    if not 1 < len(ranks) <= peer_triton.MAX_RANKS or not one_host or str(group) in _memories:
        return
    if not all(torch.cuda.can_device_access_peer(here, other) for other in others):
        return
    capacity = TOTAL_SLICE_BYTES // len(ranks) // 16 * 16
    size = peer_triton.HEADER_BYTES + 2 * len(ranks) * capacity
    buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda", here))
    buffer.zero_()  # flags and numbers of calls
    handle = symmetric_memory.rendezvous(buffer, group)
    views = [handle.get_buffer(rank, buffer.shape, buffer.dtype) for rank in range(len(ranks))]
    peers = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=buffer.device)
    torch.cuda.synchronize()
    dist.barrier(_resolve(group))  # nobody stores into a buffer before its flags are zero
    polls = min(int(timeout_s * POLLS_PER_SECOND), MAX_POLLS)
    _memories[str(group)] = PeerMemory(
        peers, handle.rank, capacity, polls, peer_triton.MAX_PROGRAMS, peer_triton, (buffer, handle, views)
    )
    _capacities[str(group)] = capacity


def serves(group: Any, size: int | torch.SymInt) -> bool:
    """Whether the ranks of a group exchange `size` bytes per rank through each other's memory."""
    return bool(size <= _capacities.get(str(group), -1))


def serves_sum(group: Any, size: int | torch.SymInt, ranks: int) -> bool:
    """Whether the ranks of a group sum tensors of `size` bytes through each other's memory."""
    return serves(group, size) or serves(group, share_bytes(size, ranks))


def share_bytes(size: int | torch.SymInt, ranks: int) -> int | torch.SymInt:
    """Bytes that a rank sums of a tensor of `size` bytes that is summed in two exchanges."""
    return -(-size // (16 * ranks)) * 16


def sums_in_two(size: int, ranks: int, capacity: int) -> bool:
    """Whether two exchanges sum a tensor of `size` bytes sooner than one, or it does not fit one."""
    spared = size * (ranks - 1) * (ranks - 2) // ranks  # of the ranks - 1 times `size` that one exchange sends
    return size > capacity or spared > SECOND_EXCHANGE_BYTES


def merges(group: Any, out: torch.Tensor, own_heads: int) -> bool:
    """Whether the ranks of a group merge partial results out [..., heads, dim] through each other's memory."""
    heads, dim = out.shape[-2:]
    size = out.numel() // (heads * dim) * own_heads * (dim * out.element_size() + 4)
    return serves(group, size) and dim & (dim - 1) == 0


def _resolve(group: Any) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(group)


def _power_of_two(values: int, programs: int) -> int:
    """The least power of two of values in a tile by which one round of the programs covers all."""
    return 1 << (-(-values // programs) - 1).bit_length() if values > programs else 1


def _fake_merge(
    out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None, own_heads: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, dim = out.shape
    return out.new_empty((rows, own_heads, dim)), lse.new_empty((rows, own_heads))


library.impl("peer_sum", lambda x, group: _memories[group].sum(x), "CUDA")
library.impl("peer_gather", lambda x, ranks, group: _memories[group].gather(x), "CUDA")
library.impl("peer_merge", lambda *args: _memories[args[-1]].merge(*args[:-1]), "CUDA")
torch.library.register_fake("mla_suite_ranks::peer_sum", lambda x, group: torch.empty_like(x), lib=library)
torch.library.register_fake(
    "mla_suite_ranks::peer_gather", lambda x, ranks, group: x.new_empty((ranks, *x.shape)), lib=library
)
torch.library.register_fake("mla_suite_ranks::peer_merge", _fake_merge, lib=library)
