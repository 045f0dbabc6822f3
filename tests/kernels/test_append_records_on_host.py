"""sm_90's blocks of records that scale all values, run on a CPU (kernels_on_host.py): the reference's bytes exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hostile_inputs import fused_pairs, raw
from kernels_on_host import compiled, packed, with_a_fault, written
from planted import each_of

from mla_suite import archs
from mla_suite.archs.sm_90 import Kernels
from mla_suite.archs.sm_90.append_kv import RECORDS
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.append_kv import APPEND_KV, AppendKvArgs, reference

TOKENS, PAGES, PAGE = 24, 9, 5
ANGLES = {"none": None, "fp32": torch.float32, "bf16": torch.bfloat16}
build = partial(compiled, "append_records.cpp")
WARPS_OF_A_TOKEN = {"HOST_BLOCK_THREADS": 256, "TOKENS": 8}
BULK = {"HOST_BLOCK_THREADS": 1024, "TOKENS": 512}


def rows_of(seed):
    """bf16 rows: of every size, zeros of both signs, a NaN, infinities, and bounds between two e2m1 codes."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(TOKENS, 512, generator=draw) * 2.0 ** torch.randint(
        -40, 40, (TOKENS, 32), generator=draw
    ).repeat(1, 16)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])[torch.randint(0, 8, (4, 512), generator=draw)]
    rows[:4] = bounds * torch.randint(8, 16, (4, 1), generator=draw) * torch.randn(4, 512, generator=draw).sign()
    rows[4:6] = torch.tensor([0.0, -0.0]).repeat(2, 256)
    rows[6, 100], rows[7, 500], rows[8, 3] = torch.nan, torch.inf, -torch.inf
    rows[9] *= 1e-38
    rows[10] = 3e38
    # Quotients that lie between two codes of e4m3, by scales of 3 / 64 and 5 / 64, whose reciprocals are rounded.
    between = (17 + 2 * torch.randint(0, 8, (2, 512), generator=draw)) * 2.0 ** torch.randint(
        -9, -2, (2, 512), generator=draw
    )
    rows[11:13] = between * torch.tensor([[3.0], [5.0]])
    rows[13] = torch.randn(512, generator=draw) * 0.005  # e4m3 has no more than a bit of some scales of these
    rows[11:13, ::128], rows[11:13, 1::128] = torch.tensor([[21.0], [35.0]]), -0.0
    return rows.bfloat16()


def arguments(name, seed, angles, interleaved):
    kind, rows = get_kv_format(name), rows_of(seed)
    latent = 448 if angles != "none" or kind.rope else 512
    cache = caches.empty(kind, PAGES, PAGE)
    raw(cache).fill_(0xAA)
    slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(seed))[:TOKENS].int()
    cos_sin = positions = None
    if ANGLES[angles] is not None:
        turn = torch.rand(50, 32, generator=torch.Generator().manual_seed(seed)) * 6.28
        cos_sin = torch.cat([turn.cos(), turn.sin()], 1).to(ANGLES[angles])
        positions = (torch.arange(TOKENS) * 7 % 50).int()
    k_pe = rows[:, latent:].contiguous()
    if ANGLES[angles] == torch.float32 and interleaved:
        a, b, cos, sin = (values.view(-1, 32) for values in fused_pairs(10 * 32, seed))
        k_pe[14:, ::2], k_pe[14:, 1::2] = a.bfloat16(), b.bfloat16()
        cos_sin[positions[14:].long()] = torch.cat([cos, sin], 1)
    return AppendKvArgs(
        *(rows[:, :latent].contiguous(), k_pe, cache, slots, None, cos_sin, positions),
        kv_format=name,
        interleaved=interleaved,
    )


def by_kernel(program, folder, args, group):
    """The cache after the program, whose blocks have `group` tokens."""
    answer = Kernels(archs.get("sm_90")).append_kv(APPEND_KV.describe(args))
    (launch,) = answer.config.spec((), args).launches
    given = dict(params=packed("append_kv", launch, group=group), kv_c=args.kv_c, k_pe=args.k_pe)
    given |= dict(cache=raw(args.kv_cache), slots=args.slot_mapping)
    given |= {} if args.cos_sin is None else dict(cos_sin=args.cos_sin, positions=args.positions)
    made = written(program, (), folder, given, "cache")
    return made.as_strided(args.kv_cache.shape, args.kv_cache.stride())


def with_positive_nan(kind, cache):
    """All bytes, e4m3's NaN among the values without its sign, of which the definition says nothing."""
    slots = torch.arange(PAGES * PAGE)
    if kind.by_name["latent"].encoding == "e4m3fn":
        codes = caches.fields_at(kind, cache, slots)["latent"].view(torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0x7F
        caches.put_fields(kind, cache, slots, {"latent": codes})
    return raw(cache)


def differs(program, folder, args, group):
    """The number of bytes that differ from the reference's."""
    got = by_kernel(program, folder, args, group)
    reference.run(None, (), args)
    kind = get_kv_format(args.kv_format)
    return int((with_positive_nan(kind, got) != with_positive_nan(kind, args.kv_cache)).sum())


def differences(program, folder, name, group=8):
    """Bytes that differ from the reference's, over all ways to rotate, by blocks of `group` tokens or a few less."""
    found = 0
    for seed, angles in enumerate(ANGLES if RECORDS[name] != "v32nope" else ["none"]):
        for interleaved in (True, False) if angles != "none" else (True,):
            found += differs(program, folder, arguments(name, seed, angles, interleaved), group - seed)
    return found


@pytest.fixture(scope="module", params=["v41", "v41_fp4", "v32nope"])
def instance(request, tmp_path_factory):
    """A record, and the program of its kernel."""
    constants = {"FORMAT": request.param, **WARPS_OF_A_TOKEN}
    return request.param, build(tmp_path_factory.mktemp("append") / "append", constants)


@pytest.fixture(scope="module", params=["v41_fp4", "v41", "v32nope"])
def bulk(request, tmp_path_factory):
    """A record, and the program of its kernel for many tokens."""
    return request.param, build(tmp_path_factory.mktemp("bulk") / "append", {"FORMAT": request.param, **BULK})


def test_the_references_bytes(instance, tmp_path):
    record, program = instance
    for name in (name for name, of in RECORDS.items() if of == record):
        assert differences(program, tmp_path, name) == 0, name


def repeated(tokens, wide, seed):
    """Rows of which many have a slot that others have, in the same block and in others, or none."""
    args = arguments("v41", 0, "fp32", True)
    draw = torch.Generator().manual_seed(seed)
    which = torch.arange(tokens) % TOKENS
    slots = torch.randint(-2, PAGES * PAGE - 1, (tokens,), generator=draw)
    slots[torch.randint(0, tokens, (tokens // 2,), generator=draw)] = 7
    few = torch.randperm(tokens, generator=draw)[: tokens // 4]
    slots[few] = slots[few.roll(1)]
    slots[1] = slots[-1] = PAGES * PAGE - 1  # no other token has it
    kind = torch.int64 if wide else torch.int32
    rows = dict(kv_c=args.kv_c[which], k_pe=args.k_pe[which], positions=args.positions[which].to(kind))
    return replace(args, slot_mapping=slots.to(kind), **rows)


@pytest.mark.parametrize("instance", ["v41"], indirect=True)
@pytest.mark.parametrize(("tokens", "wide", "group"), [(24, False, 1), (60, True, 8), (61, False, 8), (1100, True, 7)])
def test_the_last_of_a_slots_tokens_is_written(instance, tmp_path, tokens, wide, group):
    """1,100 tokens: more slots than the block's threads load at once."""
    _, program = instance
    assert differs(program, tmp_path, repeated(tokens, wide, tokens), group) == 0


@pytest.mark.parametrize("bulk", ["v41_fp4", pytest.param("v32nope", marks=pytest.mark.full)], indirect=True)
def test_the_references_bytes_of_many_tokens(bulk, tmp_path):
    record, program = bulk
    assert differences(program, tmp_path, next(name for name, of in RECORDS.items() if of == record), TOKENS) == 0


@pytest.mark.parametrize("bulk", ["v41"], indirect=True)
@pytest.mark.parametrize(("tokens", "wide", "group"), [(60, True, 23), (1100, False, 400)])
def test_the_last_of_a_slots_tokens_is_written_of_many(bulk, tmp_path, tokens, wide, group):
    _, program = bulk
    assert differs(program, tmp_path, repeated(tokens, wide, tokens), group) == 0


ROUNDED = "__fmaf_rn(__fmaf_rn(-near, scale, value), inverse, near)"
ROW, CODES, WARPS, MANY = (
    f"sm_90/append_kv/{name}.hpp" for name in ("record_row", "record_codes", "append_by_warps", "append_bulk")
)
FAULTS = {
    "rotated values rounded to zero": (
        ROW,
        "Wave::pack_bf16(a, b)",
        "bit_cast<uint32_t>(a) >> 16 | (bit_cast<uint32_t>(b) & 0xffff0000)",
    ),
    "a rotation that is not fused": (
        "common/encode.hpp",
        "__builtin_fmaf(a, cos, -Wave::product(b, sin))",
        "Wave::difference(Wave::product(a, cos), Wave::product(b, sin))",
    ),
    "a tie goes up": (CODES, "+ (pair >> 9 & 0x00010001)", "+ 0x00010001"),
    "no largest code": (CODES, "stored - 8 > 0x7d - 8", "stored > 0xff"),
    "no largest code of a small scale": (CODES, "stored - 8 > 0x7d - 8", "stored > 0x7d"),
    "codes of NaN": (CODES, "& some;", ";"),
    "halves exchanged": (CODES, "(even >> 1 & 0x07070707)", "(odd >> 1 & 0x07070707)"),
    "the scale of half a tile": (ROW, "apart < LANES", "apart < LANES / 2"),
    "later tokens of the block": (WARPS, "!again &&", ""),
    "a block that looks at the next only": (WARPS, "base >= p.tokens", "true"),
    "what other warps have seen": (WARPS, "seen |= shared.found[i];", ";"),
    "the last token for those behind it": (
        WARPS,
        "token + i * threads < p.tokens ? later[i].slot(p) : -1",
        "later[i].slot(p)",
    ),
    "rows that later blocks write": (MANY, "if (rows == 0) return;", "return;"),
    "angles of the row before": (MANY, "list[i + ahead].position", "list[i].position"),
    "a quotient that is not rounded": (CODES, f"copysignf({ROUNDED}", "copysignf(near"),
    "-0 becomes +0": (CODES, f"copysignf({ROUNDED}, value)", ROUNDED),
}


FAULTY = {
    "the scale of half a tile": "v41",
    "a rotation that is not fused": "v41",
    "a quotient that is not rounded": "v32_nope",
    "-0 becomes +0": "v32_nope",
}


@each_of(FAULTS, "a tie goes up", place=lambda header, right, broken: (header, right))
def test_a_fault_is_found(tmp_path, name):
    changed = with_a_fault(tmp_path / "csrc", *FAULTS[name])
    record = FAULTY.get(name, "v41" if FAULTS[name][0] in (WARPS, MANY) else "v41_fp4")
    constants, group = (BULK, 400) if FAULTS[name][0] == MANY else (WARPS_OF_A_TOKEN, 8)
    program = build(tmp_path / "append", {"FORMAT": RECORDS[record], **constants}, changed)
    if FAULTS[name][0] in (WARPS, MANY):
        assert differs(program, tmp_path, repeated(1100, False, 3), group) > 0
    else:
        assert differences(program, tmp_path, record) > 0
