"""Kernels in which GPUs of one host exchange data by storing into each other's memory: one launch, one way.

Every rank has a buffer that all ranks reach. A program stores its share into every peer's buffer, raises its flag
there, waits for the same program's flag of every peer, and reduces what arrived. Flags are numbers of exchanges that
only grow, kept per program, so nothing is reset and a captured graph may be replayed. Two halves of the data area take
turns: a rank that stores into a half for the second time has seen a flag of the exchange between, which its peer sent
after it had read the first.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

MAX_PROGRAMS = 128  # of a launch, each with flags of its own; below the compute units of every GPU with such links
MAX_RANKS = 16
MAX_BLOCK = 8192  # values in a program's registers: 8 warps of 32
_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_MAX_RANKS = tl.constexpr(MAX_RANKS)
FLAG_BYTES = 4 * MAX_RANKS * MAX_PROGRAMS  # [ranks][MAX_PROGRAMS]; behind them every program counts its exchanges
_CALLS_AT = tl.constexpr(FLAG_BYTES)
HEADER_BYTES = FLAG_BYTES + 4 * MAX_PROGRAMS
_HEADER = tl.constexpr(HEADER_BYTES)


# Assertions are on for the flag that does not come; Triton's own checks of integers would come along with them.
OPTIONS = {} if os.environ.get("TRITON_INTERPRET") == "1" else {"sanitize_overflow": False}


@triton.jit
def _slice(peers, owner, writer, call, capacity, WORLD: tl.constexpr):
    """Address in `owner`'s memory of what `writer` leaves there in this call."""
    return tl.load(peers + owner) + _HEADER + ((call & 1) * WORLD + writer).to(tl.int64) * capacity


@triton.jit
def _values(peers, owner, writer, call, capacity, like, WORLD: tl.constexpr):
    """The same address as a pointer to values of `like`'s type."""
    address = _slice(peers, owner, writer, call, capacity, WORLD)
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _signal_and_wait(peers, rank, call, polls, WORLD: tl.constexpr):
    """Tells every peer that this program's data of exchange `call` has arrived there, and waits for theirs.

    A thread for each peer does both, so that the waits for the links and for the peers run side by side.
    """
    program = tl.program_id(0)
    peer = tl.arange(0, _MAX_RANKS)
    others = (peer < WORLD) & (peer != rank)
    theirs = tl.load(peers + peer, mask=others, other=0) + 4 * (rank * _MAX_PROGRAMS + program)
    own = tl.load(peers + rank) + 4 * (peer * _MAX_PROGRAMS + program)
    tl.debug_barrier()  # every thread's stores are before the flags
    tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int32)), call, mask=others, sem="release", scope="sys")
    left = polls
    # A peer may be one exchange ahead already. The difference stays right when the numbers wrap around.
    while _behind(own.to(tl.pointer_type(tl.int32)), others, call) & (left > 0):
        left -= 1
    tl.device_assert(left > 0, "a rank did not join a collective within the timeout")
    tl.debug_barrier()


@triton.jit
def _behind(flags, others, call):
    """Whether one of the other ranks has not raised its flag for exchange `call`."""
    raised = tl.atomic_add(flags, 0, mask=others, sem="acquire", scope="sys")
    return tl.min(tl.where(others, raised - call, 0)) < 0


@triton.jit
def _begin(peers, rank):
    """-> where this program counts its exchanges, and the number of this one."""
    counter = (tl.load(peers + rank) + _CALLS_AT + 4 * tl.program_id(0)).to(tl.pointer_type(tl.int32))
    return counter, tl.load(counter) + 1


@triton.jit(do_not_specialize=["rank", "polls"], debug=True)
def reduce_kernel(
    x,  # [values]
    out,  # [values], the sum over all ranks; or [WORLD, values], x of every rank
    peers,  # [WORLD] int64, addresses of the ranks' buffers
    rank,
    values,
    capacity,  # bytes of a slice
    polls,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Grid: the same number of programs in every call. The sum is made in fp32 in the order of the ranks, so that all
    ranks have the same bits."""
    program = tl.program_id(0)
    counter, call = _begin(peers, rank)
    blocks = (values + BLOCK - 1) // BLOCK
    for block in range(program, blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < values)
        for step in tl.static_range(1, WORLD):
            to = _values(peers, (rank + step) % WORLD, rank, call, capacity, x, WORLD)
            tl.store(to + at, value, mask=at < values)
    if program < blocks:
        _signal_and_wait(peers, rank, call, polls, WORLD)
    for block in range(program, blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(x + at, mask=at < values)
        total = tl.zeros([BLOCK], tl.float32)
        for writer in tl.static_range(0, WORLD):
            source = _values(peers, rank, writer, call, capacity, x, WORLD)
            arrived = tl.load(source + at, mask=(at < values) & (writer != rank), cache_modifier=".cg")
            value = tl.where(writer == rank, own, arrived)
            if GATHER:
                tl.store(out + writer * values + at, value, mask=at < values)
            else:
                total += value.to(tl.float32)
        if not GATHER:
            tl.store(out + at, total.to(out.dtype.element_ty), mask=at < values)
    tl.store(counter, call)


@triton.jit(do_not_specialize=["rank", "polls"], debug=True)
def scattered_sum_kernel(
    x,  # [values]
    out,  # [values], the sum over all ranks
    peers,  # [WORLD] int64, addresses of the ranks' buffers
    rank,
    values,
    share,  # values that a rank sums, a multiple of 16 bytes; rank r has those from r * share on
    capacity,  # bytes of a slice
    polls,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`reduce_kernel`'s sum, bit for bit, in two exchanges: every rank sums its share, then sends it to all.

    Grid: the same number of programs in every call. A rank sends 2 (WORLD - 1) / WORLD times its values, where one
    exchange sends WORLD - 1 times; and it waits for the other ranks twice.
    """
    program = tl.program_id(0)
    counter, call = _begin(peers, rank)
    blocks = (share + BLOCK - 1) // BLOCK
    for block in range(program, blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            live = (at < share) & (peer * share + at < values)
            value = tl.load(x + peer * share + at, mask=live)
            tl.store(_values(peers, peer, rank, call, capacity, x, WORLD) + at, value, mask=live)
    if program < blocks:
        _signal_and_wait(peers, rank, call, polls, WORLD)
    for block in range(program, blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        live = (at < share) & (rank * share + at < values)
        own = tl.load(x + rank * share + at, mask=live)
        total = tl.zeros([BLOCK], tl.float32)
        for writer in tl.static_range(0, WORLD):
            source = _values(peers, rank, writer, call, capacity, x, WORLD) + at
            arrived = tl.load(source, mask=live & (writer != rank), cache_modifier=".cg")
            total += tl.where(writer == rank, own, arrived).to(tl.float32)
        result = total.to(out.dtype.element_ty)
        tl.store(out + rank * share + at, result, mask=live)
        for step in tl.static_range(1, WORLD):
            to = _values(peers, (rank + step) % WORLD, rank, call + 1, capacity, x, WORLD)
            tl.store(to + at, result, mask=live)
    if program < blocks:
        _signal_and_wait(peers, rank, call + 1, polls, WORLD)
    for block in range(program, blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            writer = (rank + step) % WORLD
            live = (at < share) & (writer * share + at < values)
            source = _values(peers, rank, writer, call + 1, capacity, x, WORLD) + at
            tl.store(out + writer * share + at, tl.load(source, mask=live, cache_modifier=".cg"), mask=live)
    tl.store(counter, call + 1)


@triton.jit(do_not_specialize=["rank", "polls"], debug=True)
def merge_kernel(
    out,  # [rows, heads, DIM], this rank's partial results of all heads
    lse,  # [rows, heads] fp32
    attn_sink,  # [heads] fp32, or None
    merged,  # [rows, own_heads, DIM]
    merged_lse,  # [rows, own_heads] fp32
    peers,  # [WORLD] int64, addresses of the ranks' buffers
    rank,
    items,  # rows x own_heads
    heads,
    own_heads,
    heads_apart,  # rank r merges heads r * heads_apart on: own_heads, or 0 where every rank merges all
    capacity,  # bytes of a slice
    polls,
    WORLD: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # rows of the result in a tile
):
    """Grid: the same number of programs in every call. A slice is [rows x own_heads, DIM] values, then their lse."""
    program = tl.program_id(0)
    counter, call = _begin(peers, rank)
    lse_at = items.to(tl.int64) * (DIM * out.dtype.element_ty.primitive_bitwidth // 8)
    blocks = (items + BLOCK - 1) // BLOCK
    column = tl.arange(0, DIM)[None, :]
    for block in range(program, blocks, tl.num_programs(0)):
        item = block * BLOCK + tl.arange(0, BLOCK)
        live = item < items
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            address = _slice(peers, peer, rank, call, capacity, WORLD)
            source = item // own_heads * heads + peer * heads_apart + item % own_heads
            value = tl.load(out + source[:, None].to(tl.int64) * DIM + column, mask=live[:, None])
            to = tl.multiple_of(address.to(tl.pointer_type(out.dtype.element_ty)), 16)
            tl.store(to + item[:, None] * DIM + column, value, mask=live[:, None])
            lse_to = (address + lse_at).to(tl.pointer_type(tl.float32))
            tl.store(lse_to + item, tl.load(lse + source, mask=live), mask=live)
    if program < blocks:
        _signal_and_wait(peers, rank, call, polls, WORLD)
    for block in range(program, blocks, tl.num_programs(0)):
        item = block * BLOCK + tl.arange(0, BLOCK)
        live = item < items
        head = rank * heads_apart + item % own_heads
        source = item // own_heads * heads + head
        own_lse = tl.load(lse + source, mask=live, other=-float("inf"))
        largest = own_lse
        for step in tl.static_range(1, WORLD):
            address = _slice(peers, rank, (rank + step) % WORLD, call, capacity, WORLD) + lse_at
            theirs = tl.load(address.to(tl.pointer_type(tl.float32)) + item, mask=live, other=-float("inf"))
            largest = tl.maximum(largest, theirs)
        shift = tl.where(largest == -float("inf"), 0.0, largest)  # of a row that has seen nothing
        weights = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK, DIM], tl.float32)
        for writer in tl.static_range(0, WORLD):
            address = _slice(peers, rank, writer, call, capacity, WORLD)
            elsewhere = live & (writer != rank)
            theirs = tl.load((address + lse_at).to(tl.pointer_type(tl.float32)) + item, mask=elsewhere)
            values = tl.multiple_of(address.to(tl.pointer_type(out.dtype.element_ty)), 16)
            arrived = tl.load(
                values + item[:, None] * DIM + column, mask=elsewhere[:, None], other=0.0, cache_modifier=".cg"
            )
            here = live & (writer == rank)
            own = tl.load(out + source[:, None].to(tl.int64) * DIM + column, mask=here[:, None], other=0.0)
            weight = tl.exp(tl.where(writer == rank, own_lse, theirs) - shift)
            value = tl.where(writer == rank, own, arrived).to(tl.float32)
            weights += weight
            total += tl.where(weight[:, None] == 0.0, 0.0, weight[:, None] * value)
        seen = weights != 0.0  # NaN stays NaN
        denominator = weights
        if attn_sink is not None:
            denominator += tl.exp(tl.load(attn_sink + head, mask=live, other=0.0) - shift)
        result = tl.where(seen[:, None], total / denominator[:, None], 0.0)
        place = item[:, None].to(tl.int64) * DIM + column
        tl.store(merged + place, result.to(merged.dtype.element_ty), mask=live[:, None])
        tl.store(merged_lse + item, tl.where(seen, shift + tl.log(weights), -float("inf")), mask=live)
    tl.store(counter, call)
