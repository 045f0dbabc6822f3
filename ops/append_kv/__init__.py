"""append_kv: rotate (optional), quantise and write new tokens into a paged KV cache."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import torch

from mla_suite.core import checks, dispatch, eager
from mla_suite.core.op import Op, Output
from mla_suite.core.register import register
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.append_kv import compare, reference, samples

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SLOT_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class AppendKvArgs:
    """The arguments of `append_kv`, documented there, in the order of the schema."""

    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    kv_descale: torch.Tensor | None = None
    cos_sin: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    _: KW_ONLY
    kv_format: str
    interleaved: bool = True


class Problem(NamedTuple):
    """The properties a choice of append kernel may depend on."""

    tokens: int
    kv_format: str
    alignment: int  # largest power of two up to 16 that divides the cache's address and block stride, in bytes
    dtype: torch.dtype
    latent: int
    rope: int
    rotated: bool
    vectors: bool  # loads of 16 bytes reach every row of kv_c, and loads of two values those of k_pe and cos_sin


def append_kv(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_descale: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    kv_format: str,
    interleaved: bool = True,
) -> None:
    """Write `tokens` new rows into `kv_cache`, each at its slot. Mutates `kv_cache` and nothing else.

    kv_c          [tokens, latent] bfloat16, float16 or float32: the un-rotated part (512; 448 for dsv4)
    k_pe          [tokens, rope] of the same dtype: the part that carries positions (64)
    kv_cache      [num_pages, page_size, width] in `kv_format`; blocks may lie further apart than their tokens need
    slot_mapping  [tokens] int32 or int64: page id * page_size + offset; a negative slot skips its token
    kv_descale    [] or [1] fp32 above 0, for fp8 and fp8_fnuz: a value x is stored as x / kv_descale (None is 1)
    cos_sin       [max_len, rope] float: cosines then sines, rope / 2 each; rotates k_pe before it is stored
    positions     [tokens] int32 or int64: the row of cos_sin of each token; given exactly when cos_sin is
    kv_format     a name of `python -m mla_suite formats`; its scale rule quantises
    interleaved   True pairs k_pe elements (2i, 2i + 1), False pairs (i, i + rope / 2)

    Every byte of a written token is written, padding of the record as zero; no other byte changes. Values are rotated
    in fp32 and rounded once; for V4.1's records they are rounded to the type of k_pe before their scales are chosen,
    as vLLM's and SGLang's CUDA writers do. If several tokens have the same slot, the last of them stays. What is
    written carries no gradient. Slots past the cache, which a GPU skips, positions past cos_sin and a kv_descale that
    is not finite or not above 0 are refused on the CPU and in debug mode.
    """
    tensors = kv_c, k_pe, kv_cache, slot_mapping, kv_descale, cos_sin, positions
    eager.call(APPEND_KV.functional, tensors, (kv_format, interleaved))


def check(args: AppendKvArgs) -> tuple[Output, ...]:
    fmt = get_kv_format(args.kv_format)
    checks.tensor("append_kv", "kv_c", args.kv_c, rank=2, dtypes=INPUT_DTYPES, names="[tokens, latent]")
    types = (args.kv_c.dtype,)
    checks.tensor("append_kv", "k_pe", args.k_pe, rank=2, dtypes=types, like=args.kv_c, names="[tokens, rope]")
    tokens, latent = args.kv_c.shape
    rope = args.k_pe.shape[1]
    checks.shape("append_kv", "k_pe", args.k_pe, (tokens, rope), "[tokens, rope]")
    if not fmt.dense:
        # A seamless record takes its row divided anywhere, so a latent whose end is rotated already as well.
        divided = latent if fmt.seamless and 0 < latent <= fmt.head_dim else fmt.latent
        for name, values, width in (("kv_c", args.kv_c, divided), ("k_pe", args.k_pe, fmt.head_dim - divided)):
            part = "latent" if name == "kv_c" else "rope"
            checks.shape("append_kv", name, values, (tokens, width), f"[tokens, {part}] of kv_format {fmt.name!r}")
    caches.check(fmt, args.kv_cache, latent + rope, op="append_kv", argument="kv_cache", like=args.kv_c)
    checks.written_whole("append_kv", "kv_cache", args.kv_cache)
    caches.check_descale(fmt, args.kv_descale, args.kv_c, op="append_kv", argument="kv_descale")
    of_tokens = partial(
        checks.tensor, "append_kv", dtypes=SLOT_DTYPES, sizes=(tokens,), names="[tokens]", like=args.kv_c
    )
    of_tokens("slot_mapping", args.slot_mapping)
    if (args.cos_sin is None) != (args.positions is None):
        missing, given = ("cos_sin", "positions") if args.cos_sin is None else ("positions", "cos_sin")
        checks.fail("append_kv", missing, f"is missing although {given} is given", "pass both or neither")
    if args.cos_sin is not None and args.positions is not None:
        names = "[max_len, rope]"
        checks.tensor("append_kv", "cos_sin", args.cos_sin, rank=2, dtypes=INPUT_DTYPES, names=names, like=args.kv_c)
        checks.shape("append_kv", "cos_sin", args.cos_sin, (args.cos_sin.shape[0], rope), names)
        if rope % 2 != 0:
            checks.fail("append_kv", "k_pe", f"has {rope} values", "only an even number can be rotated in pairs")
        of_tokens("positions", args.positions)
    return ()


def describe(args: AppendKvArgs) -> Problem:
    reached = [_reached(args.kv_c, 16), _reached(args.k_pe, 2 * args.k_pe.element_size())]
    if args.cos_sin is not None:
        reached.append(_reached(args.cos_sin, 2 * args.cos_sin.element_size()))
    return Problem(
        tokens=args.kv_c.shape[0],
        kv_format=args.kv_format,
        alignment=caches.alignment(args.kv_cache),
        dtype=args.kv_c.dtype,
        latent=args.kv_c.shape[1],
        rope=args.k_pe.shape[1],
        rotated=args.cos_sin is not None,
        vectors=all(reached),
    )


def _reached(rows: torch.Tensor, size: int) -> bool:
    """Whether every row begins on a multiple of `size` bytes, less than 2 GiB behind the one before.

    Rows of no values, the rope part of formats without one, are never loaded.
    """
    if rows.shape[1] == 0:
        return True
    apart = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0
    return rows.data_ptr() % size == 0 and apart % size == 0 and apart < 2**31


def validate(args: AppendKvArgs) -> None:
    caches.check_base(get_kv_format(args.kv_format), args.kv_cache, op="append_kv", argument="kv_cache")
    caches.check_descale_value(args.kv_descale, op="append_kv", argument="kv_descale")
    if args.slot_mapping.numel() == 0:
        return
    slots = args.kv_cache.shape[0] * args.kv_cache.shape[1]
    largest = int(args.slot_mapping.max())
    if largest >= slots:
        possible = f"the cache has slots 0..{slots - 1}, and a negative one skips its token"
        checks.fail("append_kv", "slot_mapping", f"holds slot {largest}", possible)
    if args.cos_sin is not None and args.positions is not None:
        used = args.positions[args.slot_mapping >= 0]
        wrong = used[(used < 0) | (used >= args.cos_sin.shape[0])]
        if wrong.numel():
            possible = f"cos_sin has rows 0..{args.cos_sin.shape[0] - 1}"
            checks.fail("append_kv", "positions", f"holds position {int(wrong[0])}", possible)


APPEND_KV = register(
    Op(
        name="append_kv",
        results="()",
        writes="kv_cache",
        Args=AppendKvArgs,
        check=check,
        describe=describe,
        validate=validate,
        backends=dispatch.backends("append_kv", reference.run),
        samples=samples.samples,
        compare=compare.compare,
    )
)
