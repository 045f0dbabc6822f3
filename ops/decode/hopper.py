"""decode on sm_90: which instance, into how many cuts, and the copy engine's maps."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Offer, Refusal
from mla_suite.launch import has_kernel, tensor_map
from mla_suite.ops.combine import config as combine_configs

ROWS = 64  # of a block: 64 x 512 results in fp32 are half of an SM's registers
KEYS = 32  # of a stage: one copy, one Q K^T, one P V
STAGES = 5
# 16-value steps of Q K^T whose queries lie in registers, by source of the keys.
REGISTER_STEPS = {"tma": 28, "gather": 24, "selected": 22}
PROBABILITY_BYTES = ROWS * KEYS * 2 + 3 * 4 * ROWS + 128  # a slot of them
PAIR_BYTES = 5 * 4 * ROWS + 8 * (4 + 4 * 4)  # for the merge by two blocks: what both cuts count, and barriers
PROMISE_BYTES = 16 + 4096  # where combine waits for words: a barrier, and what they are at first
SIDE_STAGES = 4  # where probabilities are exchanged: there are two stages of 256 columns of the other's keys, two slots
# of its probabilities, what both cuts count, barriers, and what one row's side is at first.
SIDES_BYTES = 2 * KEYS * 512 + 2 * PROBABILITY_BYTES + 5 * 4 * ROWS + 8 * (2 + 2 * 2 + 2 * 2 + 2 * 4) + 16 + 1024
WIDTHS = (576, 512)
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SOURCES = ("tma", "gather")
EXCHANGES = ("none", "reduce_o", "exchange_p")
MOST_ROWS = 2**25 - 1  # of a sequence: 32 bits count its partial results in 16 bytes
MOST_REACH = 2**35  # elements from the results of a sequence's first row to those of its last, likewise

# What a launch takes, in microseconds; only differences between split counts matter. Fitted to times on an H200, which
# the sum meets within 7 % on average (csrc/sm_90/PERF.md).
STAGE_US = 0.72
BUSY_STAGE_US = 0.12  # more where every unit is busy, and in proportion: power holds the clock down
ITEM_US = 4.5  # of each item of a block beside its stages
READ_BYTES_PER_US = 4.6e6
MOST_ROUNDS = 8  # of a block through equal cuts; more even out the last round by little and cost scratch
MERGE_US = 2.6  # of combine, however little it merges
MERGED_BYTES_PER_US = 0.1e6  # of partials, written and read, by a unit
LATE_MERGE_US = 3.1  # more of combine where some of its workgroups found no unit before decode ended
SHARED_WAY_US = 0.7  # more where blocks are neighbours: two units have one way to L2, and partials are to go it
AWAITED_US = 1.3  # less of a merge where combine need not wait for the end of decode
FILLED_ROWS = 32  # of a block that decode fills while its first keys are on their way; more of them take as long as
FILLING_STAGES = 4  # of its keys
TOGETHER_US = 1.0  # of a merge of two cuts by the two blocks of a cluster,
TOGETHER_GAIN = 0.1  # less so much of decode's own time, which partials would draw out
SIDES_US = -0.5  # where these send each other probabilities: what they begin with comes to both
SIDES_AWAITED_US = 0.7  # as AWAITED_US, where they do
SIDES_BEHIND_US = 0.4  # more where combine merges their partials behind decode: neighbours store these at once


@dataclass(frozen=True)
class HopperConfig:
    """One instance of csrc/sm_90/decode/decode.cu. Construction raises ValueError, in a sentence, for an illegal point.

    dtype     type of queries, cache and result
    width     values of a cached row
    source    'tma': the copy engine brings 32 keys of one page at a time; 'gather': threads bring keys of any pages
    exchange  what the blocks of a cluster of two, which have two cuts of a sequence, send each other so that one result
              or partial comes of both: 'reduce_o' or 'exchange_p'; 'none' without a cluster, as for gathered keys
    """

    arch: Arch = field(repr=False)
    dtype: str
    width: int
    source: str
    exchange: str = "none"

    def __post_init__(self) -> None:
        if self.arch.name != "sm_90":
            self._refuse(f"{self.arch.name} is not sm_90")
        for name, value, possible in (
            ("dtype", self.dtype, tuple(ELEMENTS.values())),
            ("width", self.width, WIDTHS),
            ("source", self.source, SOURCES),
            ("exchange", self.exchange, exchanges(self.source)),
        ):
            if value not in possible:
                self._refuse(f"{name} is one of {', '.join(map(str, possible))}")
        if self.lds > self.arch.lds_bytes:
            self._refuse(f"it needs {self.lds} bytes of shared memory of {self.arch.lds_bytes}")

    def _refuse(self, why: str) -> None:
        point = f"dtype={self.dtype} width={self.width} source={self.source}"
        raise ValueError(f"decode: no kernel at {point} on {self.arch.name}: {why}")

    @property
    def threads(self) -> int:
        return 512  # four warpgroups: one brings keys, one makes probabilities, two hold the result

    @property
    def lds(self) -> int:
        """Dynamic shared memory in bytes, as csrc/sm_90/decode/shared_storage.hpp lays it out."""
        alone = block_bytes(self.width, self.stages, REGISTER_STEPS[self.source])
        beside = {"none": PROMISE_BYTES, "reduce_o": PAIR_BYTES, "exchange_p": SIDES_BYTES}[self.exchange]
        return alone + (beside if self.source == "tma" else 0)

    @property
    def stages(self) -> int:
        return SIDE_STAGES if self.exchange == "exchange_p" else STAGES

    @property
    def box_blocks(self) -> int:
        """Blocks of 64 values of 32 keys that the copy engine brings at a time."""
        return 1 if self.exchange == "exchange_p" else self.width // 64

    @property
    def instance(self) -> str:
        return f"decode_dtype-{self.dtype}_dqk-{self.width}_kvsource-{self.source}_clustermode-{self.exchange}"

    def tiles(self, rows: int) -> int:
        """Blocks that share the keys of one work item."""
        return -(-rows // ROWS)


def exchanges(source: str) -> tuple[str, ...]:
    """What the blocks of a cluster may send each other, by how keys come."""
    return EXCHANGES if source == "tma" else EXCHANGES[:1]


def block_bytes(width: int, stages: int, register_steps: int) -> int:
    """Shared memory of a block with a ring of `stages` for rows of `width` values, as DecodePolicy lays it out."""
    keys = stages * KEYS * width * 2
    queries = (width // 16 - register_steps) * 2048
    return keys + queries + 2 * PROBABILITY_BYTES + 4 * 32 + 8 * (2 * stages + 2 * 2 + 2 * 4)


def hopper_config(problem: Any, arch: Arch) -> HopperConfig:
    """The instance for a problem. It sees neither batch nor lengths, so a batch-invariant call may use it."""
    source = "tma" if problem.page % KEYS == 0 else "gather"
    return HopperConfig(arch, ELEMENTS[problem.q_dtype], problem.head_dim, source)


def offer(problem: Any, arch: Arch) -> Offer | Refusal:
    why = _unsupported(problem)
    if why is not None:
        return Refusal(why)
    config = hopper_config(problem, arch)
    for needed in (
        *(replace(config, exchange=exchange).instance for exchange in exchanges(config.source)),
        combine_configs.invariant(arch, problem.head_dim_v).instance,
    ):
        if not has_kernel(arch, needed):
            return Refusal(f"kernel {needed} is not built for {arch.name}; run `python -m mla_suite build`")
    rows = problem.heads * problem.q_len
    return Offer(config, f"{config.tiles(rows)} tiles of {ROWS} rows for {problem.q_len} x {problem.heads} query rows")


def _unsupported(problem: Any) -> str | None:
    """Why the kernels cannot take a problem; None when they can."""
    if problem.q_dtype not in ELEMENTS:
        return f"q is {problem.q_dtype}; it takes bfloat16 or float16"
    if problem.kv_format != ELEMENTS[problem.q_dtype]:
        return f"kv_format {problem.kv_format} with {problem.q_dtype} queries; it takes {ELEMENTS[problem.q_dtype]}"
    if problem.head_dim not in WIDTHS or problem.head_dim_v != 512:
        return f"rows of {problem.head_dim} values with head_dim_v {problem.head_dim_v}; it takes 576 or 512 with 512"
    if problem.rope:
        return "rope_cos_sin; it takes keys that were rotated before they were cached"
    if problem.alignment < tensor_map.ALIGNMENT:
        return f"kv_cache is aligned to {problem.alignment} bytes; its address and block stride must be multiples of 16"
    rows = problem.heads * problem.q_len
    if rows < 1 or rows > MOST_ROWS or rows * problem.heads >= 2**32:
        return f"{rows} query rows of {problem.heads} heads; it takes 1 to {MOST_ROWS}, rows x heads below {2**32}"
    return None


def whole_blocks(split_size: int) -> int:
    """A cut of the batch-invariant mode in whole stages: a copy may not reach into the next page."""
    return -(-split_size // KEYS) * KEYS


def workers(arch: Arch, items: int, tiles: int) -> int:
    """Groups of `tiles` blocks that walk the work list: one block on every SM, as far as there are items."""
    return max(1, min(items, arch.compute_units // tiles))


class Estimate(NamedTuple):
    """What decode takes, in microseconds, where sequences have at most `stages` x 32 keys."""

    arch: Arch
    source: str  # of the keys: merges other than combine behind decode are for 'tma'
    batch: int
    rows: int
    stages: int

    @property
    def tiles(self) -> int:
        return -(-self.rows // ROWS)

    def groups(self, splits: int) -> int:
        return workers(self.arch, self.batch * splits, self.tiles)

    def busy(self, splits: int) -> int:
        """Units that have a block."""
        return self.groups(splits) * self.tiles

    def stages_of(self, splits: int) -> int:
        """Of a cut."""
        return -(-self.stages // splits)

    def decode(self, splits: int) -> float:
        """Of the blocks, up to their partials. A cut shortens the way of each through the keys."""
        stage = STAGE_US + BUSY_STAGE_US * self.busy(splits) / self.arch.compute_units
        read = self.batch * self.stages * KEYS * 1152 / READ_BYTES_PER_US
        rounds = -(-self.batch * splits // self.groups(splits))
        return max(rounds * (self.stages_of(splits) * stage + ITEM_US), read)

    def combine(self, splits: int, partials: int) -> float:
        """Of combine, with so many partials of each sequence.

        It is placed while decode runs, on the units that decode leaves free, and reads with those.
        """
        units = self.arch.compute_units
        free = units - self.busy(splits)
        size = self.batch * self.rows * partials * 2048
        config = combine_configs.rule(self.arch, 512, self.batch * self.rows, partials)
        early = min(1.0, free * config.resident / config.grid(self.batch * self.rows))
        merge = early * size / (max(free, 1) * MERGED_BYTES_PER_US)
        if early < 1:
            merge = max(merge, LATE_MERGE_US + (1 - early) * size / (units * MERGED_BYTES_PER_US))
        return MERGE_US + merge

    def merge(self, splits: int) -> float:
        """Of what merges the cuts of each sequence: combine."""
        if splits == 1:
            return 0.0
        saved = AWAITED_US if self.awaiting(splits) is not None else 0.0
        return self.combine(splits, splits) + self.shared_way(splits) - saved

    def awaiting(self, splits: int, exchange: str = "none") -> combine_configs.AwaitingConfig | None:
        """What merges the cuts while decode still runs, if anything may: not before all of its words are filled."""
        partials, runs = (splits, 2) if exchange == "none" else (splits // 2, 4)
        filled = min(self.rows, ROWS) <= FILLED_ROWS or self.stages_of(splits) >= FILLING_STAGES
        if partials == 1 or exchange == "reduce_o" or not filled or not self.one_item(splits):
            return None
        return combine_configs.awaiting(self.arch, 512, self.rows, self.batch, partials, self.busy(splits), runs)

    def merge_pairs(self, splits: int) -> float:
        """The same where the blocks of a cluster first merge each two cuts, by sending results."""
        pair = TOGETHER_US - TOGETHER_GAIN * self.decode(splits) + 2 * self.shared_way(splits)
        return pair if splits == 2 else pair + self.combine(splits, splits // 2)

    def merge_sides(self, splits: int) -> float:
        """The same by sending probabilities."""
        if splits == 2:
            return SIDES_US
        pair = SIDES_US + self.combine(splits, splits // 2)
        if self.awaiting(splits, "exchange_p") is not None:
            return pair - SIDES_AWAITED_US
        return pair + SIDES_BEHIND_US + self.shared_way(splits)

    def shared_way(self, splits: int) -> float:
        """More where blocks are neighbours."""
        return SHARED_WAY_US if self.busy(splits) > self.arch.compute_units // 2 else 0.0

    def in_pairs(self, splits: int) -> bool:
        """Whether the blocks of a cluster can merge each two cuts."""
        return splits % 2 == 0 and self.one_item(splits)

    def merges(self, splits: int) -> dict[str, float]:
        """What merging takes by what the blocks of clusters send each other."""
        alone = {"none": self.merge(splits)}
        if not self.in_pairs(splits):
            return alone
        return alone | {"reduce_o": self.merge_pairs(splits), "exchange_p": self.merge_sides(splits)}

    def exchange(self, splits: int) -> str:
        """What they should send, if anything."""
        merges = self.merges(splits)
        return min(merges, key=merges.__getitem__)

    def one_item(self, splits: int) -> bool:
        """Whether every block has one, brought by the copy engine."""
        return self.source == "tma" and self.groups(splits) == self.batch * splits

    def all(self, splits: int) -> float:
        """Of decode and what merges its cuts."""
        return self.decode(splits) + min(self.merges(splits).values())


@lru_cache(maxsize=4096)
def cuts(arch: Arch, source: str, batch: int, rows: int, stages: int) -> int:
    """Cuts per sequence of at most `stages` x 32 keys, where none were asked for: what should take the least time."""
    estimate = Estimate(arch, source, batch, rows, stages)
    return least(arch, batch * estimate.tiles, stages, estimate.all)


def least(arch: Arch, blocks: int, stages: int, microseconds: Callable[[int], float]) -> int:
    """The cuts that take the least time, of as many as make sense: `blocks` are those of one cut of every sequence."""
    most = min(stages, arch.compute_units, MOST_ROUNDS * arch.compute_units // blocks)
    return min(range(1, max(1, most) + 1), key=microseconds)


_MAPS = tuple(f"{what}_map_{word}" for what in ("kv", "q") for word in range(tensor_map.WORDS))
_POINTERS = (
    *("kv_cache", "seq_lens", "page_ids", "kv_indptr", "cu_seqlens_q"),
    *("attn_sink", "plan", "out", "lse", "partial_out", "partial_lse"),
)
LEADING = (*_MAPS, *_POINTERS)
"""The parameters that are made anew for every call: they hold addresses."""
_pack_leading = struct.Struct(f"<{len(LEADING)}Q").pack
_NO_MAP = (0,) * tensor_map.WORDS


class Boxes(NamedTuple):
    """How the copy engine sees a tensor: what a map holds beside the address."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def leading(keys: Boxes | None, queries: Boxes, q_at: int, addresses: tuple[int, ...]) -> bytes:
    """The parameters LEADING for tensors at `addresses`, in the order of _POINTERS; keys is None where none are mapped.

    A cache without pages has no address; nothing of it is read, but a map needs one.
    """
    keys_map = _NO_MAP if keys is None else tensor_map.swizzled(addresses[0] or q_at, *keys)
    return _pack_leading(*keys_map, *tensor_map.swizzled(q_at, *queries), *addresses)


def key_boxes(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box_blocks: int) -> Boxes:
    """The cache in boxes of 32 keys of a page, [box_blocks of 64 values][key][64], as a stage holds them."""
    pages, page, width = shape
    # A stride along a dimension of one page means nothing.
    apart = strides[0] if pages > 1 else page * width
    blocks = width // 64
    return Boxes(dtype, (64, page, blocks, max(pages, 1)), (width * 2, 128, apart * 2), (64, KEYS, box_blocks, 1))


def query_boxes(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, q_len: int) -> Boxes:
    """The queries, as one matrix of rows that have a pitch, in boxes of half of a block's rows, [32 values][row][32].

    Rows of a box come in whole turns of the swizzle, which are eight.
    """
    apart = pitch(shape, strides)
    if apart is None:
        raise ValueError(f"decode: query rows of sizes {shape} and strides {strides} are no matrix; copy them first")
    heads, width = shape[-2:]
    rows, blocks = min(ROWS, -(-heads * q_len // 8) * 8), width // 32
    return Boxes(dtype, (32, prod(shape[:-1]), blocks), (apart * 2, 64), (32, rows, blocks // 2))


def within_reach(q_len: int, heads: int, strides: tuple[int, ...]) -> bool:
    """Whether the kernels find all results of a sequence from its first, by strides of [..., tokens, heads, values]."""
    return (q_len - 1) * strides[-3] + (heads - 1) * strides[-2] < MOST_REACH


def pitch(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements from each row of the queries to the next, heads, tokens and sequences alike; None where they vary."""
    apart, rows = 0, 1
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size > 1 and (stride == 0 or stride != (apart * rows if apart else stride)):
            return None
        apart, rows = apart or (stride if size > 1 else 0), rows * size
    return apart or shape[-1]
