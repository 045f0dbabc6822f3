"""plan: share the keys of ragged sequences among SM parts, as one tensor that stays right when lengths change."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from mla_suite import launch
from mla_suite.archs import ArchSpec
from mla_suite.core import checks, dispatch, eager
from mla_suite.core.op import Op, Output, converted
from mla_suite.core.prepared import ceil_div, rounded_up
from mla_suite.core.register import register
from mla_suite.launch.launcher import compute_units
from mla_suite.ops.plan import metadata, reference, samples, scheduler

MAX_SM_PARTS = 1024  # a device has at most 304 compute units; the search for splits is quadratic in the parts


@dataclass(frozen=True)
class PlanArgs:
    """The arguments of `plan`, documented there, in the order of the schema."""

    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    _: KW_ONLY
    num_heads: int
    max_seqlen_q: int
    num_sm_parts: int
    max_seqlen_kv: int
    num_splits: int = 0
    split_size: int = 0
    window_left: int = -1


class Problem(NamedTuple):
    """The properties a choice of plan kernel may depend on."""

    batch: int
    num_heads: int
    max_seqlen_q: int
    num_sm_parts: int
    num_splits: int
    split_size: int


def plan(
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    num_heads: int,
    max_seqlen_q: int = 1,
    max_seqlen_kv: int = 0,
    num_sm_parts: int | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    window_left: int = -1,
) -> torch.Tensor:
    """Split sequences along their keys and share the work tiles among the device's compute units.

    seq_lens      [batch] int32, keys per sequence; for sparse_decode [query tokens], keys selected over all pools
    cu_seqlens_q  [batch + 1] int32, query tokens per sequence; a sequence without any costs nothing
    num_heads     heads of the queries. It and max_seqlen_q, the most query tokens of a sequence, go into the cost
                  model of seq_lens' device; other heads, query tokens and devices may use the plan, too
    max_seqlen_kv longest sequence the plan will be used with; 0 if unknown, which split_size does not allow
    num_sm_parts  parts that share the work, 1..1024; None: one for each group of compute units that holds all query
                  rows of a sequence. More give the same results, but their work tiles wait for each other
    num_splits    > 0: this number of equal splits per sequence
    split_size    > 0: a split at every multiple of this number of keys, or at quarters of a sequence of more than one
                  and up to four, whatever the batch (batch-invariant); `batch_invariant_split_size` proposes one
    window_left   >= 0: the plan is for a decode with this window, and counts the keys in it alone; sequences without
                  cu_seqlens_q have max_seqlen_q query tokens then

    -> int32 [words], laid out as `ops/plan/metadata.py` says: batch + num_sm_parts work tiles when balanced,
    batch x num_splits when forced, at most batch x ceil(max_seqlen_kv / split_size) when batch-invariant, or four for
    each sequence; ValueError above 64 MiB.

    One plan serves every layer of a step, any heads and query length. The last work tile of each sequence is open, so a
    plan made for other lengths is slower, never wrong: it may be captured once and replayed while sequences grow. Only
    batch-invariant bits need a plan of the lengths that it is used with. Its arrival counters serve one stream at a
    time. Compiled code asks for the device's parts once, when it is traced.
    """
    if num_sm_parts is None:
        if not is_dynamo_compiling():
            _check_kinds(seq_lens, num_heads, max_seqlen_q)
            num_heads, max_seqlen_q = converted((int, int), (num_heads, max_seqlen_q))  # NumPy's product may overflow
        num_sm_parts = sm_parts(seq_lens, num_heads * max_seqlen_q)
    options = num_heads, max_seqlen_q, num_sm_parts, max_seqlen_kv, num_splits, split_size, window_left
    return eager.call(PLAN.functional, (seq_lens, cu_seqlens_q), options)


def batch_invariant_split_size(num_heads: int, max_seqlen_q: int = 1) -> int:
    """Return a `split_size` in keys that suits small and large batches of such queries.

    Short splits keep the device busy with few sequences; long ones leave fewer results, each as large as the query rows
    of a sequence, to add up. The figures behind it are those of an H100, in the `PERF.md` of its combine. Nothing but
    heads and query tokens decides, so results stay batch-invariant; they change with the split size, though, so keep
    the one that you began with.
    """
    for name, value in (("num_heads", num_heads), ("max_seqlen_q", max_seqlen_q)):
        checks.whole("batch_invariant_split_size", name, value)
    num_heads, max_seqlen_q = converted((int, int), (num_heads, max_seqlen_q))  # NumPy's product may overflow
    if num_heads < 1 or max_seqlen_q < 1:
        given = f"are {num_heads} and {max_seqlen_q}"
        checks.fail("batch_invariant_split_size", "num_heads and max_seqlen_q", given, "both must be 1 or more")
    return 512 if num_heads * max_seqlen_q <= 128 else 1024


def _check_kinds(seq_lens: Any, num_heads: Any, max_seqlen_q: Any) -> None:
    """Refuse arguments that no number of parts follows from, which the operator would refuse too."""
    checks.is_tensor("plan", "seq_lens", seq_lens)
    for name, value in (("num_heads", num_heads), ("max_seqlen_q", max_seqlen_q)):
        checks.whole("plan", name, value)


def sm_parts(tensor: torch.Tensor, num_q_rows: int) -> int:
    """Parts for sequences of `num_q_rows` rows on a tensor's device: compute units over tiles of rows, at least 1.

    Each tile of query rows takes a compute unit beside the others, so this number of work tiles run at a time.
    """
    if num_q_rows < 1:
        checks.fail("plan", "num_heads x max_seqlen_q", f"is {num_q_rows}", "both must be 1 or more")
    if is_dynamo_compiling():
        units, tile_rows = _units_and_tile_rows(tensor.device)
    else:
        units, tile_rows = _device_units(launch.current_arch(tensor), tensor.device)
    return parts_on(units, tile_rows, num_q_rows)


def parts_on(units: int, tile_rows: int, num_q_rows: int) -> int:
    """`sm_parts` of a device with as many compute units, each of which holds `tile_rows` query rows."""
    return min(max(1, units // -(-num_q_rows // tile_rows)), MAX_SM_PARTS)


def _units_and_tile_rows(device: torch.device) -> tuple[int, int]:
    return _device_units(launch.current_arch(torch.empty(0, device=device)), device)


# torch.compiler.assume_constant_result sets this mark, but imports torch._dynamo to do so: 2 s and 130 MB.
_units_and_tile_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute


@dispatch.cached
def _device_units(arch: ArchSpec | None, device: torch.device) -> tuple[int, int]:
    """Compute units of a device, and the query rows that one of them holds."""
    units = compute_units(device) if arch is None else arch.compute_units
    return units, scheduler.tile_rows(arch)


def check(args: PlanArgs) -> tuple[Output, ...]:
    checks.tensor("plan", "seq_lens", args.seq_lens, rank=1, dtypes=checks.INDEX)
    batch = args.seq_lens.shape[0]
    checks.field(
        "plan", args, "cu_seqlens_q", checks.INDEX, sizes=(batch + 1,), names="[batch + 1]", like=args.seq_lens
    )
    if args.num_heads < 1:
        checks.fail("plan", "num_heads", f"is {args.num_heads}", "it takes 1 or more")
    if args.max_seqlen_q < 1:
        checks.fail("plan", "max_seqlen_q", f"is {args.max_seqlen_q}", "it takes 1 or more")
    if args.num_sm_parts < 1 or args.num_sm_parts > MAX_SM_PARTS:
        checks.fail("plan", "num_sm_parts", f"is {args.num_sm_parts}", f"it takes 1..{MAX_SM_PARTS}")
    if args.max_seqlen_kv < 0 or args.max_seqlen_kv > metadata.OPEN:
        checks.fail("plan", "max_seqlen_kv", f"is {args.max_seqlen_kv}", f"it takes 0..{metadata.OPEN}")
    check_splits("plan", args.num_splits, args.split_size)
    check_window("plan", args.window_left)
    if args.split_size > 0 and args.max_seqlen_kv < 1:
        given = f"is {args.max_seqlen_kv} with split_size={args.split_size}"
        checks.fail("plan", "max_seqlen_kv", given, "pass the longest length")
    layout = metadata.layout_for(
        batch,
        args.num_sm_parts,
        max_seqlen_kv=args.max_seqlen_kv,
        num_splits=args.num_splits,
        split_size=args.split_size,
    )
    if checks.certain(layout.words * 4 > metadata.BYTE_LIMIT):
        given = f"would have {layout.work_tile_capacity} work tiles in {layout.words * 4} bytes"
        checks.fail("plan", "the plan", given, f"at most {metadata.BYTE_LIMIT} bytes: use fewer or larger splits")
    return (Output((layout.words,), torch.int32),)


def check_splits(op: str, num_splits: int, split_size: int) -> None:
    """Refuse split arguments that are negative or no int32, and both at once."""
    if num_splits < 0 or num_splits > metadata.OPEN:
        checks.fail(op, "num_splits", f"is {num_splits}", f"it takes 1..{metadata.OPEN}, or 0 to leave it open")
    if split_size < 0 or split_size > metadata.OPEN:
        checks.fail(op, "split_size", f"is {split_size}", f"it takes 1..{metadata.OPEN} keys, or 0 for none")
    if num_splits > 0 and split_size > 0:
        given = f"is {num_splits} with split_size={split_size}"
        checks.fail(op, "num_splits", given, "pass one of the two: splits are counted or sized")


def check_window(op: str, window_left: int) -> None:
    """Refuse a window that is neither -1 nor a number of keys."""
    if window_left < -1 or window_left > metadata.OPEN:
        possible = f"it takes 0..{metadata.OPEN} keys left of a query token, or -1 for all"
        checks.fail(op, "window_left", f"is {window_left}", possible)


def describe(args: PlanArgs) -> Problem:
    sizes = args.num_heads, args.max_seqlen_q, args.num_sm_parts
    return Problem(args.seq_lens.shape[0], *sizes, args.num_splits, args.split_size)


def validate(args: PlanArgs) -> None:
    check_lengths("plan", args.seq_lens, args.max_seqlen_kv)
    if args.cu_seqlens_q is not None and (args.cu_seqlens_q[0] != 0 or (args.cu_seqlens_q.diff() < 0).any()):
        checks.fail("plan", "cu_seqlens_q", f"is {args.cu_seqlens_q.tolist()}", "it must rise from 0")


def check_lengths(op: str, seq_lens: torch.Tensor, max_seqlen_kv: int, argument: str = "seq_lens") -> None:
    """Refuse negative lengths, and lengths above max_seqlen_kv where it is given. Reads device data."""
    most = max_seqlen_kv or metadata.OPEN
    wrong = ((seq_lens < 0) | (seq_lens > most)).nonzero()
    if wrong.numel():
        b = int(wrong[0])
        possible = f"it takes 0..{most}" + (" (max_seqlen_kv)" if max_seqlen_kv else "")
        checks.fail(op, f"{argument}[{b}]", f"is {int(seq_lens[b])}", possible)


_OPTIONS = [entry.name for entry in fields(PlanArgs) if entry.kw_only]
_LONGEST, _SPLIT_SIZE = _OPTIONS.index("max_seqlen_kv"), _OPTIONS.index("split_size")


@lru_cache(maxsize=4096)
def longest_counted(max_seqlen_kv: int, split_size: int) -> int:
    """max_seqlen_kv as a bound that calls of many steps share: rounded up by at most a 64th, or to whole splits of
    split_size, which are then as many. What is out of range stays as it is, to be refused."""
    if not 0 <= max_seqlen_kv <= metadata.OPEN:
        return max_seqlen_kv
    longest = ceil_div(max_seqlen_kv, split_size) * split_size if split_size > 0 else rounded_up(max_seqlen_kv)
    return min(longest, metadata.OPEN)


def rounded(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of the operator with max_seqlen_kv as `longest_counted` says."""
    longest, split_size = options[_LONGEST], options[_SPLIT_SIZE]
    if longest.__class__ is int and split_size.__class__ is int:
        longest = longest_counted(longest, split_size)
    return *options[:_LONGEST], longest, *options[_LONGEST + 1 :]


def check_words(op: str, plan: torch.Tensor, batch: int | torch.SymInt, like: torch.Tensor) -> None:
    """Refuse a tensor that is no plan for `batch` sequences by its dtype, device or size."""
    checks.tensor(op, "plan", plan, rank=1, dtypes=checks.INDEX, like=like)
    least = metadata.smallest_words(batch)
    if checks.certain(plan.shape[0] < least):
        checks.fail(op, "plan", f"has {plan.shape[0]} words", f"one for {batch} sequences has at least {least}")


def check_plan(op: str, plan: torch.Tensor, batch: int, counted: str, num_splits: int, split_size: int) -> None:
    """Refuse a plan for another batch, which `counted` says in words, or made with other splits. Reads device data."""
    header = metadata.Plan.read(plan, op).header
    made = header[metadata.Word.BATCH]
    if made != batch:
        checks.fail(op, "plan", f"was made for {made} sequences", f"{counted} {batch}")
    for name, given in (("num_splits", num_splits), ("split_size", split_size)):
        used = header[metadata.Word[name.upper()]]
        if given and used != given:
            checks.fail(op, name, f"is {given}", f"the plan was made with {used}: pass that or 0")


def _defaults(seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
    """The keyword arguments of the operator from those of `plan`."""
    kwargs = {"max_seqlen_q": 1, "max_seqlen_kv": 0, **kwargs}
    if kwargs.get("num_sm_parts") is None and "num_heads" in kwargs:
        _check_kinds(seq_lens, kwargs["num_heads"], kwargs["max_seqlen_q"])
        kwargs["num_sm_parts"] = sm_parts(seq_lens, kwargs["num_heads"] * kwargs["max_seqlen_q"])
    return kwargs


PLAN = register(
    Op(
        name="plan",
        results="Tensor",
        Args=PlanArgs,
        check=check,
        describe=describe,
        validate=validate,
        backends=dispatch.backends("plan", reference.run),
        samples=samples.samples,
        defaults=_defaults,
        rounded=rounded,
    )
)
