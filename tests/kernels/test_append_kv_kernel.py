"""append_kv's machine code for gfx942 and gfx950 in the emulator, every check on: the reference's bytes exactly."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from backend_calls import BackendCalls, assert_refused
from built import emulated, require_built
from hostile_inputs import filled, fused_pairs, raw
from made_formats import made

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs.append_kv import MAX_TOKENS, AppendConfig, is_one_run
from mla_suite.core import dispatch
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import KV_FORMATS, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.append_kv import APPEND_KV

NATIVE = BackendCalls(APPEND_KV, "native")
REFERENCE = BackendCalls(APPEND_KV, "reference")

ARCHS = ("gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def config_of(arch, tokens, name):
    return AppendConfig(arch, tokens, one_run=is_one_run(get_kv_format(name)))


def require_kernels(arch):
    for tokens, name in itertools.product((1, MAX_TOKENS), ("bf16", "v41")):
        require_built(arch, config_of(archs.get(arch), tokens, name).instance)


arch = emulated(require_kernels, record=True)


def both(empty, kv_c, k_pe, slots, *rest, name="bf16", descale=None, config=None, part=slice(None), **kwargs):
    """Two caches of `empty()`, or their pages `part`, written by the native kernel and by the reference.

    `config` is the kernel's, or None for what a call gets, which must be native.
    """
    written = []
    for native in (True, False):
        cache = empty()
        call = (kv_c, k_pe, cache[part], slots, descale, *rest)
        if not native:
            REFERENCE.run(None, (), *call, kv_format=name, **kwargs)
        elif config is not None:
            NATIVE.run(config, (), *call, kv_format=name, **kwargs)
        else:
            problem = APPEND_KV.problem(*call, kv_format=name, **kwargs)
            choice = dispatch.choose("append_kv", APPEND_KV.backends, problem, dispatch.arch_of(kv_c), "cpu")
            assert choice.backend.name == "native", str(choice)
            torch.ops.mla_suite.append_kv(*call, kv_format=name, **kwargs)
        written.append(cache)
    return written


def assert_same_bytes(name, pages, page, *args, padded=True, **kwargs):
    """In caches that were full of 0xaa, the room between their blocks included."""
    kind = get_kv_format(name)
    kwargs = {"descale": descale_of(kind), **kwargs}
    mine, theirs = both(lambda: filled(kind, pages, page, padded=padded), *args, name=name, **kwargs)
    assert torch.equal(raw(mine), raw(theirs))


def rows(kind, tokens, dtype=torch.bfloat16, spread=4.0):
    values = torch.randn(tokens, kind.head_dim) * spread
    return values[:, : kind.latent].to(dtype), values[:, kind.latent :].to(dtype)


def descale_of(kind):
    return torch.tensor([0.0371]) if kind.per_tensor_descale else None


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_every_kv_format_and_input_type(arch, name, dtype):
    kind = get_kv_format(name)
    kv_c, k_pe = rows(kind, 6, dtype)
    slots = torch.randperm(5 * 3)[:6]
    slots[2] = -1
    cos_sin = torch.rand(50, kind.rope + 8).to(dtype)[:, : kind.rope]  # columns of a wider table
    positions = torch.randint(0, 50, (6,), dtype=torch.int32)
    for interleaved in (True, False):
        assert_same_bytes(name, 5, 3, kv_c, k_pe, slots, cos_sin, positions, interleaved=interleaved)
    assert_same_bytes(name, 5, 3, kv_c, k_pe, slots.int(), padded=False)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_of_records_multiplies_and_adds_in_one_rounding(arch, interleaved):
    a, b, cos, sin = (values.view(15, 32) for values in fused_pairs(15 * 32, 7))
    k_pe = torch.stack([a, b], dim=2 if interleaved else 1).flatten(1).bfloat16()
    slots, cos_sin = torch.randperm(15), torch.cat([cos, sin], dim=1)
    latents = torch.zeros(15, 448).bfloat16()
    assert_same_bytes("v41", 5, 3, latents, k_pe, slots, cos_sin, torch.arange(15), interleaved=interleaved)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_any_bits(arch, name):
    """Random fp32 patterns: denormals, both zeros, every exponent, values that saturate. NaN and inf apart."""
    kind = get_kv_format(name)
    bits = torch.randint(-(2**31), 2**31, (16, kind.head_dim), dtype=torch.int64).to(torch.int32)
    bits[:8] = (bits[:8] & 0x8007FFFF - (1 << 32)) | torch.randint(107, 137, bits[:8].shape, dtype=torch.int32) << 23
    bits[0] = torch.arange(kind.head_dim, dtype=torch.int32) * 0x80000 + 0x3A000000  # ties of every encoding
    bits[1, ::2] = -(2**31)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, 1.0)
    assert_same_bytes(name, 4, 4, values[:, : kind.latent], values[:, kind.latent :], torch.arange(16), descale=None)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_nan_and_infinity(arch, name, dtype):
    kind = get_kv_format(name)
    kv_c, k_pe = rows(kind, 4, dtype)
    kv_c[0, 3], kv_c[1, 200], kv_c[1, 5] = torch.nan, torch.inf, -torch.inf
    if kind.rope:
        k_pe[0, 1], k_pe[2, 7] = torch.nan, torch.inf
    written = both(lambda: filled(kind, 1, 4), kv_c, k_pe, torch.arange(4), name=name, descale=descale_of(kind))
    mine, theirs = (caches.unpack(kind, cache, descale=descale_of(kind)) for cache in written)
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("tokens", [1, 8])
def test_slots_past_the_cache_write_nothing(arch, tokens):
    """A kernel skips what the CPU and debug mode refuse, like a negative slot: no byte outside the cache is touched."""
    kind = get_kv_format("bf16")
    kv_c, k_pe = rows(kind, 6)
    slots = torch.tensor([3, 12, 2**31 - 1, 2**31 + 3, 2**40 + 5, -(2**33)])
    cache = filled(kind, 4, 3)
    config = AppendConfig(arch, tokens)
    NATIVE.run(config, (), kv_c, k_pe, cache, slots, kv_format="bf16")
    expected = filled(kind, 4, 3)
    REFERENCE.run(None, (), kv_c[:1], k_pe[:1], expected, slots[:1], kv_format="bf16")
    assert torch.equal(raw(cache), raw(expected))
    with pytest.raises(ValueError, match="slots 0..11"):
        torch.ops.mla_suite.append_kv(kv_c, k_pe, cache, slots, kv_format="bf16")


@pytest.mark.parametrize("tokens", [2, 700])
def test_of_equal_slots_the_last_token_stays(arch, tokens):
    kind = get_kv_format("dsv4")
    kv_c, k_pe = rows(kind, tokens)
    slots = torch.randint(0, 5, (tokens,))
    with emulator.configured(order="reverse"):
        assert_same_bytes("dsv4", 2, 4, kv_c, k_pe, slots)


@pytest.mark.parametrize("tokens", [2, 8, 45])
@pytest.mark.parametrize("name", ["bf16", "fp8_fnuz", "v32", "dsv4", "v41", "v41_fp4"])
def test_several_tokens_to_a_workgroup(arch, name, tokens):
    slots = torch.randint(-2, 24, (45,))
    assert_same_bytes(name, 6, 4, *rows(get_kv_format(name), 45), slots, config=config_of(arch, tokens, name))


@pytest.mark.parametrize("tokens", [1, 45])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_rows_in_whole_octets(arch, name, dtype, tokens):
    """Any finite 16-bit value, rotated both ways, several rows to a wave; skipped tokens may have any position."""
    kind = get_kv_format(name)
    bits = torch.randint(-(2**15), 2**15, (45, kind.head_dim), dtype=torch.int64).to(torch.int16)
    values = bits.view(dtype)
    values = torch.where(values.isfinite(), values, 1.0)
    values[::2] = torch.randn(23, kind.head_dim).to(dtype)
    slots = torch.randint(-2, 24, (45,))
    cos_sin = torch.rand(9, kind.rope).to(torch.float32 if tokens == 1 else dtype)
    positions = torch.where(slots < 0, 2**60, torch.arange(45) % 9)
    parts = values[:, : kind.latent], values[:, kind.latent :]
    for interleaved in (True, False):
        options = dict(config=config_of(arch, tokens, name), interleaved=interleaved)
        assert_same_bytes(name, 6, 4, *parts, slots, cos_sin, positions, **options)


def test_as_many_tokens_to_a_workgroup_as_it_takes(arch):
    """Distinct slots, of which several share a chain of the table; and a few slots over and over, in two workgroups."""
    chains, tokens = 512, 3 * MAX_TOKENS // 2
    kv_c, k_pe = torch.randn(tokens, 6), torch.randn(tokens, 2)
    for slots in (torch.arange(tokens) * (chains // 4), torch.randperm(4 * tokens)[:tokens], torch.arange(tokens) % 7):
        pages = int(slots.max()) // 64 + 1
        empty = partial(torch.full, (pages, 64, 8), 7.0, dtype=torch.bfloat16)
        assert torch.equal(*both(empty, kv_c, k_pe, slots.int(), config=AppendConfig(arch, MAX_TOKENS)))


def test_many_tokens_share_workgroups():
    gfx950 = archs.get("gfx950")
    most = MAX_TOKENS
    for tokens, group in ((1, 1), (128, 1), (2048, 1), (2049, 9), (8192, 32), (256 * most, most), (10**6, most)):
        inputs = torch.empty(tokens, 512, device="meta"), torch.empty(tokens, 64, device="meta")
        slots = torch.empty(tokens, dtype=torch.int64, device="meta")
        problem = APPEND_KV.problem(*inputs, filled(get_kv_format("bf16"), 2, 4), slots, kv_format="bf16")
        answer = NATIVE.supports(problem, gfx950)
        if isinstance(answer, Unsupported):
            pytest.skip(answer.reason)
        assert answer.config.tokens == group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rope", [0, 6, 32, 72])
@pytest.mark.parametrize("name", [name for name, kind in KV_FORMATS.items() if kind.seamless and not kind.dense])
def test_a_run_divided_anywhere(arch, name, rope, dtype):
    """Rope values are rotated and scaled with the latents beside them, in whole octets and elsewhere."""
    kind = get_kv_format(name).sized(KV_FORMATS[name].head_dim - rope, rope)
    angles = torch.rand(9, rope), torch.arange(5)
    for interleaved in (True, False):
        for rotation in (angles, ()):
            parts = rows(kind, 5, dtype)
            assert_same_bytes(name, 3, 4, *parts, torch.tensor([7, 0, -1, 11, 3]), *rotation, interleaved=interleaved)


@pytest.mark.parametrize("latent", [1, 127, 512, 700])
def test_dense_rows_of_any_width(arch, latent):
    kv_c, k_pe = torch.randn(3, latent), torch.randn(3, 18)
    empty = partial(torch.full, (2, 2, latent + 18), 7.0, dtype=torch.bfloat16)
    assert torch.equal(*both(empty, kv_c, k_pe, torch.tensor([3, 0, 2])))


def test_strided_inputs_and_a_slice_of_pages(arch):
    joined = torch.randn(4, 700).bfloat16()
    kv_c, k_pe = joined[:, 20:532], joined[:, 600:664]
    assert_same_bytes("v32", 6, 3, kv_c, k_pe, torch.tensor([8, 0, 4, 5]), part=slice(2, 5))


@pytest.mark.parametrize("latent", [1, 511])
def test_a_row_divided_within_a_byte_goes_elsewhere(arch, latent):
    row, slot = torch.randn(1, 512), torch.tensor([2])
    divided, whole = filled(get_kv_format("v41_fp4"), 1, 4), filled(get_kv_format("v41_fp4"), 1, 4)
    problem = APPEND_KV.problem(row[:, :latent], row[:, latent:], divided, slot, kv_format="v41_fp4")
    assert_refused(NATIVE.supports(problem, arch), "two values to a byte")
    mla_suite.append_kv(row[:, :latent], row[:, latent:], divided, slot, kv_format="v41_fp4")
    mla_suite.append_kv(row[:, :448], row[:, 448:], whole, slot, kv_format="v41_fp4")
    assert torch.equal(raw(divided), raw(whole))


def test_a_cache_off_alignment_is_refused():
    kind = get_kv_format("v32")
    room = torch.empty(2 * 656 * 4 + 1, dtype=torch.uint8)
    odd = room[1:].as_strided((2, 4, 656), (656 * 4, 656, 1))
    kv_c, k_pe = rows(kind, 2)
    problem = APPEND_KV.problem(kv_c, k_pe, odd, torch.arange(2), kv_format="v32")
    assert_refused(NATIVE.supports(problem, archs.get("gfx950")), "aligned to 1 bytes; kv_format v32 needs 4")


POWERS = dict(scale="e8m0", power_of_two=True)


def supported(fmt, arch):
    kv_c, k_pe = rows(fmt, 2)
    return NATIVE.supports(
        APPEND_KV.problem(kv_c, k_pe, filled(fmt, 2, 4), torch.arange(2), kv_format=fmt), archs.get(arch)
    )


@pytest.mark.parametrize(
    "fmt",
    [
        made(scale="bf16", power_of_two=True),
        made(rope="fp16"),
        made(count=256, rope="fp32", pad=12),
        made("fp16", rope="e4m3fnuz", tile=96, count=480, **POWERS),
        made(rope="e4m3fn", scale="e4m3fn", tile=64, count=448, tiles=8),
    ],
    ids=lambda fmt: fmt.name,
)
def test_a_format_that_is_taken_gets_the_references_bytes(arch, fmt):
    answer = supported(fmt, arch.name)
    assert isinstance(answer, Supported), answer.reason
    assert_same_bytes(fmt, 2, 4, *rows(fmt, 5), torch.tensor([7, 0, -1, 3, 4]), config=answer.config)


@pytest.mark.parametrize("arch_name", [*ARCHS, "sm_90"])
@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (made(scale="e4m3fn"), "has scales of any bits in e4m3fn"),
        (made(scale="bf16"), "has scales of any bits in bf16"),
        (made(scale="e8m0"), "has scales of any bits in e8m0"),
        (made(scale="fp16", power_of_two=True), "has powers of two in fp16"),
        (made(smallest=2.0**-127, power_of_two=True), "has scales from 5.88e-39 on"),
        (made(tile=256), "has a scale for 256 values"),
        (made(tiles=3), "has scales for 384 of 512 values"),
        (made(rope="e8m0"), "has values in e8m0"),
        (made(pad=5), "has fields that lie off their elements"),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_what_a_kernel_does_not_store_is_refused(arch_name, fmt, reason):
    assert_refused(supported(fmt, arch_name), f"kv_format {fmt.name} {reason}")


@pytest.mark.parametrize("arch_name", ARCHS)
@pytest.mark.parametrize("latent", ["bf16", "e4m3fnuz"])
def test_a_run_of_other_values_is_refused(arch_name, latent):
    assert_refused(
        supported(made(latent, rope=latent, tile=64, count=448, tiles=8, **POWERS), arch_name),
        f"has values in {latent}; the kernel takes e2m1, e4m3fn",
    )


def test_a_byte_of_two_tiles_is_refused():
    fmt = made("e2m1", rope="e2m1", count=16, ropes=14, scale="e4m3fn", tile=15, tiles=2)
    assert_refused(supported(fmt, "gfx942"), "has a scale for 15 values; the kernel takes 128, in pairs")
