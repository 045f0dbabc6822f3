"""convert_kv's kernels of sm_90, run on a CPU (kernels_on_host.py): the bytes of the reference, for all they take."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from backend_calls import assert_refused
from hostile_inputs import raw
from kernels_on_host import compiled, packed, with_a_fault, written
from made_formats import made
from planted import each_of

from mla_suite import archs
from mla_suite.archs.sm_90 import Kernels
from mla_suite.build.instances import instances
from mla_suite.core.dispatch import Supported
from mla_suite.kv_formats import KV_FORMATS, Field, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.convert_kv import CONVERT_KV, ConvertKvArgs, Problem, reference

TOKENS = 21
SLOTS = 24  # of either cache
DESCALE = torch.tensor([0.3])
build = partial(compiled, "convert_kv.cpp")
SM_90 = Kernels(archs.get("sm_90"))
SHIPPED = {"bf16", "fp16", "fp32", "fp8", "fp8_fnuz", "v32", "v32_pow2", "v32_nope", "dsv4", "dsv4_fnuz"}
SHIPPED |= {"v41", "v41_interleaved", "v41_vllm", "v41_fp4", "v41_fp4_interleaved"}
"""Kv_formats that have kernels. One that is declared and not named here may be refused."""
PAIRS = [
    (a, b)
    for a, read in KV_FORMATS.items()
    for b, written in KV_FORMATS.items()
    if (read.dense or written.dense or read.head_dim == written.head_dim)
    and (not caches.same_records(written, read) or a in ("fp8", "fp8_fnuz"))
]


def answer(a, b, width=512):
    """What the kernels say of caches without another fault."""
    width = next((fmt.head_dim for fmt in map(get_kv_format, (a, b)) if not fmt.dense), width)
    return SM_90.convert_kv(Problem(TOKENS, a, b, width, alignment=16, countable=True, copied=False))


TAKEN_PAIRS = [pair for pair in PAIRS if isinstance(answer(*pair), Supported)]


def rows_of(width, seed):
    """fp32 rows of every size: random bits, ties of every encoding, zeros of both signs, the largest and the least."""
    draw = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 40, (SLOTS, width // 16, 1), generator=draw)
    rows = (torch.randn(SLOTS, width // 16, 16, generator=draw) * 2.0**exponents).flatten(1)
    rows[:4] = torch.randn(4, width, generator=draw)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    rows[4:8] = bounds[torch.randint(0, 8, (4, width), generator=draw)] * torch.randint(8, 16, (4, 1), generator=draw)
    rows[6:8] = rows[6:8].nextafter(torch.tensor([[torch.inf], [0.0]]))
    rows[8] = torch.tensor([0.0, -0.0]).repeat(width // 2)
    rows[9] *= 1e-38
    rows[10] = 3e38
    rows[11:13] = (17 + 2 * torch.randint(0, 8, (2, width), generator=draw)) * torch.tensor([[3.0], [5.0]]) / 64
    rows[13] *= 0.005  # e4m3 has no more than a bit of some scales of these
    rows[11:13, ::16], rows[11:13, 1::16] = torch.tensor([[21.0], [35.0]]), -0.0
    return rows * torch.randint(0, 2, rows.shape, generator=draw).mul(2).sub(1)


def arguments(a, b, pages=(3, 8), width=None, descale=None):
    """Both caches hold SLOTS tokens; some tokens are skipped. dense rows are as wide as the record, or `width`."""
    kinds = get_kv_format(a), get_kv_format(b)
    width = width or next((kind.head_dim for kind in kinds if not kind.dense), 576)
    descales = [descale if kind.per_tensor_descale else None for kind in kinds]
    rows = rows_of(width, 0).view(-1, pages[0], width)
    source = caches.pack(kinds[0], rows.clamp(-200, 200) if kinds[0].per_tensor_descale else rows, descale=descales[0])
    destination = caches.empty(kinds[1].sized(width, 0) if kinds[1].dense else kinds[1], SLOTS // pages[1], pages[1])
    raw(destination).fill_(0xAA)
    slots = [torch.randperm(SLOTS, generator=torch.Generator().manual_seed(i))[:TOKENS].int() for i in (1, 2)]
    slots[0][5], slots[1][9], slots[1][14] = -1, -7, SLOTS
    return ConvertKvArgs(source, destination, *slots, *descales, source_format=a, destination_format=b)


def by_kernel(program, folder, args):
    """All bytes of the destination after the program."""
    answer = SM_90.convert_kv(CONVERT_KV.describe(args))
    assert isinstance(answer, Supported), answer.reason
    (launch,) = answer.config.spec((), args).launches
    given = dict(params=packed("convert_kv", launch), source=raw(args.source), destination=raw(args.destination))
    given |= dict(source_slots=args.source_slots, destination_slots=args.destination_slots)
    given |= dict(source_descale=args.source_descale, destination_descale=args.destination_descale)
    words = answer.config.source, answer.config.destination, launch.grid[0]
    return written(program, words, folder, given, "destination")


def by_reference(args):
    made = raw(args.destination).clone().view(args.destination.dtype)
    made = made.as_strided(args.destination.shape, args.destination.stride())
    kept = args.destination_slots < args.destination.shape[0] * args.destination.shape[1]
    slots = dict(source_slots=args.source_slots[kept], destination_slots=args.destination_slots[kept])
    reference.run(None, (), replace(args, destination=made, **slots))
    return made


def differences(program, folder, args):
    """Bytes that differ from the reference's. Of NaN the definition says nothing but that it is one."""
    expected = by_reference(args)
    got = by_kernel(program, folder, args)
    if args.destination_format in ("bf16", "fp16", "fp32"):
        values = [made.view(expected.dtype) for made in (got, raw(expected))]
        return int((values[0].nan_to_num(7.0) != values[1].nan_to_num(7.0)).sum())
    return int((got != raw(expected)).sum())


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("convert") / "convert", {"HOST_BLOCK_THREADS": 128})


def test_every_shipped_pair_is_taken():
    assert [pair for pair in PAIRS if SHIPPED.issuperset(pair) and pair not in TAKEN_PAIRS] == []


@pytest.mark.parametrize(("a", "b"), TAKEN_PAIRS)
def test_the_references_bytes(program, tmp_path, a, b):
    assert differences(program, tmp_path, arguments(a, b, descale=DESCALE if a == b else None)) == 0


@pytest.mark.parametrize("width", [16, 48, 160, 288, 320, 512, 1040])
@pytest.mark.parametrize(("a", "b"), [("bf16", "fp8"), ("fp8", "fp32"), ("fp32", "bf16")])
def test_dense_rows_of_any_width_of_whole_units(program, tmp_path, a, b, width):
    """Rows that leave lanes without a unit, and whose last units share a pass with those of other tokens."""
    assert differences(program, tmp_path, arguments(a, b, width=width)) == 0


@pytest.mark.parametrize("descale", [0.0371, 3.0, 1e-30, 1e30])
@pytest.mark.parametrize(("a", "b"), [("fp8", "v41_fp4"), ("fp8", "v32_nope"), ("v41", "fp8"), ("fp32", "fp8_fnuz")])
def test_descales(program, tmp_path, a, b, descale):
    assert differences(program, tmp_path, arguments(a, b, descale=torch.tensor([descale]))) == 0


@pytest.mark.parametrize("b", ["bf16", "fp32", "fp8", "v41", "v41_fp4"])
@pytest.mark.parametrize("a", ["fp8_fnuz", "dsv4_fnuz"])
def test_every_code_of_fnuz(program, tmp_path, a, b):
    """NaN's among them in some units."""
    args = arguments(a, b)
    codes = caches.fields_at(KV_FORMATS[a], args.source, torch.arange(SLOTS))
    field = codes["latent"].view(torch.uint8)
    field[:] = (torch.arange(field.shape[1]) * 37 + torch.arange(SLOTS)[:, None] * 91) % 256
    field[:, ::5] = torch.where(field[:, ::5] == 0x80, 0x81, field[:, ::5])
    field[:8] = torch.where(field[:8] == 0x80, 0, field[:8])
    caches.put_fields(KV_FORMATS[a], args.source, torch.arange(SLOTS), codes)
    assert differences(program, tmp_path, args) == 0


def test_many_tokens_with_wide_slots(program, tmp_path):
    """Several blocks, the last of which has fewer tokens."""
    args = arguments("bf16", "v41", (1, 1))
    shuffled = torch.randperm(150, generator=torch.Generator().manual_seed(3))
    source = args.source.repeat(7, 1, 1)[:150].contiguous()
    destination = caches.empty("v41", 150, 1)
    raw(destination).fill_(0xAA)
    slots = dict(source_slots=shuffled, destination_slots=shuffled.flip(0))
    assert differences(program, tmp_path, replace(args, source=source, destination=destination, **slots)) == 0


KERNEL, STORE, ELEMENTS, CODES = (
    f"sm_90/{name}.hpp"
    for name in ("convert_kv/kernel", "convert_kv/store", "convert_kv/elements", "append_kv/record_codes")
)
FAULTS = {
    "a scale of a part of its units": (
        STORE,
        "apart < 1 << place.scale_shift",
        "2 * apart < 1 << place.scale_shift",
        "v41",
        "dsv4",
    ),
    "an amax that is not divided exactly": (
        *(
            CODES,
            "__fmaf_rn(__fmaf_rn(-near, rule.divisor, largest), reciprocal, near)",
            "near",
            "fp32",
            "v32_nope",
        ),
    ),
    "values of many bits as if of few": (STORE, "p.few_bits == 0", "false", "fp32", "v41_fp4"),
    "halves exchanged in the wrong lane": (
        STORE,
        "words[k] = odd ? got : words[k];",
        "words[k] = odd ? words[k] : got;",
        "v41",
        "bf16",
    ),
    "no padding": (STORE, "place.pad != 0 &&", "place.pad > 1 &&", "bf16", "dsv4"),
    "-0 in FNUZ": (STORE, "four & ((sizes + 0x7f7f7f7f) | 0x7f7f7f7f)", "four", "bf16", "dsv4_fnuz"),
    "no largest code of a small scale": (CODES, "stored - 8 > 0x7d - 8", "stored > 0x7d", "bf16", "v41_fp4"),
    "rope values as codes": (KERNEL, "return decode_pairs<bf16>(words, unit);", "", "dsv4", "v41"),
    "a scale that is 2^-127": (ELEMENTS, "stored == 0 ? 0x00400000u", "stored == 0 ? 0u", "v41", "fp32"),
    "FNUZ's NaN": (ELEMENTS, "if (nans != 0)", "if (false)", "fp8_fnuz", "v41"),
    "tokens that are skipped": (
        KERNEL,
        "any ? static_cast<int>(to) : 0, to_page",
        "static_cast<int>(to & 15), to_page",
        "v32",
        "bf16",
    ),
}


@each_of(FAULTS, "values of many bits as if of few", place=lambda header, right, *rest: (header, right))
def test_a_fault_is_found(tmp_path, name):
    header, right, broken, a, b = FAULTS[name]
    changed = with_a_fault(tmp_path / "csrc", header, right, broken)
    program = build(tmp_path / "convert", {"HOST_BLOCK_THREADS": 128}, changed)
    args = arguments(a, b)
    if name.startswith(("FNUZ", "a scale that is")):  # bytes that no writer makes
        codes = caches.fields_at(KV_FORMATS[a], args.source, torch.arange(SLOTS))
        field = codes["scale" if "scale" in codes else "latent"].view(torch.uint8)
        field[:, ::3] = 0 if "scale" in codes else 0x80
        caches.put_fields(KV_FORMATS[a], args.source, torch.arange(SLOTS), codes)
        assert differences(build(tmp_path / "right", {"HOST_BLOCK_THREADS": 128}), tmp_path, args) == 0
    assert differences(program, tmp_path, args) > 0


def test_every_declared_kernel_is_picked():
    picked = {
        SM_90.convert_kv(CONVERT_KV.describe(arguments(a, b, descale=DESCALE if a == b else None)))
        for a, b in TAKEN_PAIRS
    }
    assert {answer.config.instance for answer in picked} == {
        item.id for item in instances("sm_90") if item.kernel == "convert_kv"
    }


POWERS = dict(scale="e8m0", power_of_two=True)
ROWS_OF_648_BYTES = replace(
    made(tile=256),
    name="rows_of_648_bytes",
    fields=(
        Field("latent", "e4m3fn", 512, 0, 648),
        Field("scale", "fp32", 2, 512, 648),
        Field("rope", "bf16", 64, 520, 648),
    ),
    alignment=8,
)
TAKEN = [
    made(),
    made(tile=64, power_of_two=True),
    made(tile=256, count=1024, **POWERS),
    made(tile=512, count=2048, **POWERS),
    made(rope=None, count=1024, **POWERS),
    made(tile=64, count=448, pad=1, **POWERS),
    made("e4m3fnuz", tile=32, divisor=224.0, **POWERS),
    made("e2m1", scale="e4m3fn", tile=16, rope=None, divisor=5.0, smallest=2.0**-9),
    made(rope="e4m3fn", tile=64, count=448, tiles=8, **POWERS),
]


@pytest.mark.parametrize("fmt", TAKEN, ids=lambda fmt: fmt.name)
def test_a_format_that_is_taken_gets_the_references_bytes(program, tmp_path, fmt):
    for a, b in ((fmt, "bf16"), ("fp32", fmt)):
        assert differences(program, tmp_path, arguments(a, b)) == 0


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (made(scale="bf16", power_of_two=True), "scales in bf16 for e4m3fn; the kernel takes fp32 or e8m0"),
        (made(scale="e4m3fn"), "scales in e4m3fn for e4m3fn"),
        (made("e2m1", tile=16, rope=None, **POWERS), "scales in e8m0 for e2m1; the kernel takes e4m3fn"),
        (made("e2m1", tile=32, rope=None, scale="e4m3fn"), "16 scales, each for 32 values, in 16 bytes"),
        (made("e2m1", tile=16, rope=None, scale="e4m3fn", divisor=8.0), "for quotients up to 8"),
        (made("bf16"), "rope values in bf16 behind bf16"),
        (made("bf16", rope=None), "scales in fp32 for bf16; the kernel takes none"),
        (made("e8m0", rope=None), "512 latents in e8m0"),
        (made(rope="fp16"), "rope values in fp16 behind e4m3fn"),
        (made(scale="e8m0"), "of any bits for e4m3fn; the kernel takes powers of two"),
        (made("e4m3fnuz", divisor=224.0), "of any bits for e4m3fnuz; the kernel takes powers of two"),
        (made("e4m3fnuz", divisor=240.0, power_of_two=True), "for quotients up to 240"),
        (made(smallest=2.0**-130), "scales from 7.35e-40 on"),
        (made(tile=32), "16 scales, each for 32 values, in 64 bytes"),
        (made(tile=96, count=480), "each for 96 values"),
        (made(tile=24, count=456, ropes=72), "456 latents in e4m3fn"),
        (made(count=256), "scales for 256 of 256 latents in rows of 320 values"),
        (made(tiles=3), "scales for 384 of 512 latents"),
        (made(pad=4), "4 bytes of padding"),
        (made(pad=1, rope=None, **POWERS), "1 bytes of padding"),
        (ROWS_OF_648_BYTES, "latents at multiples of 8 bytes; the kernel copies 16 at once"),
        (made(tile=256, **POWERS), "scales at multiples of 2 bytes; the kernel copies 4 at once"),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_what_a_kernel_does_not_read_or_write_is_refused(fmt, reason):
    for refused in (answer(fmt, "bf16"), answer("bf16", fmt)):
        assert_refused(refused, f"kv_format {fmt.name} has")
        assert reason in refused.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(width=520), "rows have 520 values"),
        (dict(alignment=8), "aligned to 8 bytes"),
        (dict(countable=False), "in 31 bits"),
        (dict(copied=True), "copied as they are"),
    ],
)
def test_refusals_are_sentences(change, reason):
    assert_refused(SM_90.convert_kv(CONVERT_KV.describe(arguments("bf16", "fp8"))._replace(**change)), reason)
