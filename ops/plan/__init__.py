"""plan: share the keys of ragged sequences among workers, as one tensor that stays right when lengths change."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mla_suite.core import checks, dispatch, faces, library
from mla_suite.core.library import Op, Output
from mla_suite.ops.plan import metadata, native, reference, samples

SCHEMA = (
    "(Tensor seq_lens, Tensor? cu_seqlens_q=None, *, SymInt rows, SymInt workers, SymInt max_seqlen_kv, "
    "SymInt num_splits=0, SymInt split_size=0) -> Tensor"
)
MAX_WORKERS = 1024  # MI300X has 304 compute units; the search for cuts is quadratic in workers


class Problem(NamedTuple):
    """What a choice of plan kernel may depend on."""

    batch: int
    rows: int
    workers: int
    max_seqlen_kv: int
    num_splits: int
    split_size: int


def plan(
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    rows: int,
    workers: int,
    max_seqlen_kv: int,
    num_splits: int = 0,
    split_size: int = 0,
) -> torch.Tensor:
    """Cut sequences along their keys and deal the pieces to workers.

    seq_lens      [batch] int32, keys per sequence; for sparse_decode [query tokens], keys selected over all pools
    cu_seqlens_q  [batch + 1] int32, query tokens per sequence; a sequence without any costs nothing
    rows          q_len x heads, for the cost model, whose figures are those of seq_lens' device; the plan is right for
                  any other, and on any other
    workers       workgroups that share the work, 1..1024: see `workers`
    max_seqlen_kv    longest sequence the plan will be used with; 0 when unknown and split_size is 0
    num_splits    > 0: exactly so many equal pieces per sequence
    split_size    > 0: a cut at every multiple of so many keys, the same for every length and batch (batch-invariant)

    -> int32 [words], laid out as `ops/plan/metadata.py` says: batch + workers items when balanced, batch x num_splits
    when forced, batch x ceil(max_seqlen_kv / split_size), 2 each at least, when batch-invariant; ValueError
    above 64 MiB.

    One plan serves every layer of a step, any heads and query length. The last item of each sequence is open, so a
    plan made for other lengths is slower, never wrong: it may be captured once and replayed while sequences grow. Its
    arrival counters serve one stream at a time.
    """
    options = rows, workers, max_seqlen_kv, num_splits, split_size
    return faces.call(PLAN, (seq_lens, cu_seqlens_q), options)


def specify(
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    rows: int,
    workers: int,
    max_seqlen_kv: int,
    num_splits: int = 0,
    split_size: int = 0,
) -> tuple[Output, ...]:
    checks.tensor("plan", "seq_lens", seq_lens, rank=1, dtypes=checks.INDEX)
    batch = seq_lens.shape[0]
    if cu_seqlens_q is not None:
        checks.tensor("plan", "cu_seqlens_q", cu_seqlens_q, rank=1, dtypes=checks.INDEX, like=seq_lens)
        checks.shape("plan", "cu_seqlens_q", cu_seqlens_q, (batch + 1,), "[batch + 1]")
    if rows < 1:
        checks.fail("plan", "rows", f"is {rows}", "it is q_len x heads, at least 1")
    if workers < 1 or workers > MAX_WORKERS:
        checks.fail("plan", "workers", f"is {workers}", f"it takes 1..{MAX_WORKERS}")
    if max_seqlen_kv < 0 or max_seqlen_kv > metadata.OPEN:
        checks.fail("plan", "max_seqlen_kv", f"is {max_seqlen_kv}", f"it takes 0..{metadata.OPEN}")
    check_splits("plan", num_splits, split_size)
    if split_size > 0 and max_seqlen_kv < 1:
        checks.fail(
            "plan", "max_seqlen_kv", f"is {max_seqlen_kv} with split_size={split_size}", "pass the longest length"
        )
    place = metadata.layout_for(
        batch, workers, max_seqlen_kv=max_seqlen_kv, num_splits=num_splits, split_size=split_size
    )
    if checks.certain(place.words * 4 > metadata.BYTE_LIMIT):
        given = f"would have {place.item_capacity} items in {place.words * 4} bytes"
        checks.fail("plan", "the plan", given, f"at most {metadata.BYTE_LIMIT} bytes: use fewer or larger splits")
    return (Output((place.words,), torch.int32),)


def check_splits(op: str, num_splits: int, split_size: int) -> None:
    """Refuse split arguments that are negative or no int32, and both at once."""
    if num_splits < 0 or num_splits > metadata.OPEN:
        checks.fail(op, "num_splits", f"is {num_splits}", f"it takes 1..{metadata.OPEN}, or 0 to leave it open")
    if split_size < 0 or split_size > metadata.OPEN:
        checks.fail(op, "split_size", f"is {split_size}", f"it takes 1..{metadata.OPEN} keys, or 0 for none")
    if num_splits > 0 and split_size > 0:
        given = f"is {num_splits} with split_size={split_size}"
        checks.fail(op, "num_splits", given, "pass one of the two: splits are counted or sized")


def problem(
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    rows: int,
    workers: int,
    max_seqlen_kv: int,
    num_splits: int = 0,
    split_size: int = 0,
) -> Problem:
    return Problem(seq_lens.shape[0], rows, workers, max_seqlen_kv, num_splits, split_size)


def validate(
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    rows: int,
    workers: int,
    max_seqlen_kv: int,
    num_splits: int = 0,
    split_size: int = 0,
) -> None:
    check_lengths("plan", seq_lens, max_seqlen_kv)
    if cu_seqlens_q is not None and (cu_seqlens_q[0] != 0 or (cu_seqlens_q.diff() < 0).any()):
        checks.fail("plan", "cu_seqlens_q", f"is {cu_seqlens_q.tolist()}", "it must rise from 0")


def check_lengths(op: str, seq_lens: torch.Tensor, max_seqlen_kv: int) -> None:
    """Refuse negative lengths, and lengths above max_seqlen_kv where it is given. Reads device data."""
    most = max_seqlen_kv or metadata.OPEN
    wrong = ((seq_lens < 0) | (seq_lens > most)).nonzero()
    if wrong.numel():
        b = int(wrong[0])
        possible = f"it takes 0..{most}" + (" (max_seqlen_kv)" if max_seqlen_kv else "")
        checks.fail(op, f"seq_lens[{b}]", f"is {int(seq_lens[b])}", possible)


def check_words(op: str, plan: torch.Tensor, batch: int | torch.SymInt, like: torch.Tensor) -> None:
    """Refuse a tensor that is no plan for `batch` sequences by its dtype, device or size."""
    checks.tensor(op, "plan", plan, rank=1, dtypes=checks.INDEX, like=like)
    least = metadata.smallest_words(batch)
    if checks.certain(plan.shape[0] < least):
        checks.fail(op, "plan", f"has {plan.shape[0]} words", f"one for {batch} sequences has at least {least}")


def check_plan(op: str, plan: torch.Tensor, batch: int, counted: str, num_splits: int, split_size: int) -> None:
    """Refuse a plan for another batch, which `counted` says in words, or made with other splits. Reads device data."""
    try:
        header = metadata.Plan.read(plan).header
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    made = header[metadata.Word.BATCH]
    if made != batch:
        checks.fail(op, "plan", f"was made for {made} sequences", f"{counted} {batch}")
    splits = (
        ("num_splits", num_splits, metadata.Word.NUM_SPLITS),
        ("split_size", split_size, metadata.Word.SPLIT_SIZE),
    )
    for name, given, word in splits:
        if given and header[word] != given:
            checks.fail(op, name, f"is {given}", f"the plan was made with {header[word]}: pass that or 0")


PLAN = library.register(
    Op(
        name="plan",
        schema=SCHEMA,
        specify=specify,
        problem=problem,
        validate=validate,
        backends=(native.BACKEND, dispatch.triton_backend("mla_suite.ops.plan.triton"), reference.BACKEND),
        samples=samples.samples,
    )
)
