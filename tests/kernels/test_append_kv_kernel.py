"""append_kv's machine code for gfx942 and gfx950 in the emulator, every check on: the reference's bytes exactly."""

from __future__ import annotations

import pytest
import torch
from backend_calls import BackendCalls

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs.append_kv import MAX_TOKENS, AppendConfig
from mla_suite.core import dispatch
from mla_suite.kv_formats import KV_FORMATS, kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.launch import has_kernel, launcher
from mla_suite.ops.append_kv import APPEND_KV

NATIVE = BackendCalls(APPEND_KV, "native")
REFERENCE = BackendCalls(APPEND_KV, "reference")

ARCHS = ("gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=ARCHS)
def arch(request):
    for tokens in (1, MAX_TOKENS):
        needed = AppendConfig(archs.get(request.param), tokens).instance
        if not has_kernel(request.param, needed):
            pytest.skip(f"{needed} is not built for {request.param}; run `python -m mla_suite build`")
    with mla_suite.emulate(request.param) as record:
        yield record


def raw(cache):
    """All bytes of the storage, room between blocks included."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


def filled(kind, pages, page, padded=True):
    cache = caches.empty(kind, pages, page, padded=padded)
    raw(cache).fill_(0xAA)
    return cache


def both(pages, page, name, *args, padded=True, descale=None, **kwargs):
    """The bytes that the native kernel and the reference leave in caches that were full of 0xaa."""
    found = []
    for run in (NATIVE.run, REFERENCE.run):
        cache = filled(kv_format(name), pages, page, padded)
        kv_c, k_pe, slots, *rest = args
        call = (kv_c, k_pe, cache, slots, descale, *rest)
        if run == NATIVE.run:
            problem = APPEND_KV.problem(*call, kv_format=name, **kwargs)
            choice = dispatch.choose("append_kv", APPEND_KV.backends, problem, dispatch.arch_of(kv_c), "cpu")
            assert choice.backend.name == "native", str(choice)
            torch.ops.mla_suite.append_kv(*call, kv_format=name, **kwargs)
        else:
            run(None, (), *call, kv_format=name, **kwargs)
        found.append(raw(cache))
    return found


def rows(kind, tokens, dtype=torch.bfloat16, spread=4.0):
    values = torch.randn(tokens, kind.head_dim) * spread
    return values[:, : kind.latent].to(dtype), values[:, kind.latent :].to(dtype)


def descale_of(kind):
    return torch.tensor([0.0371]) if kind.per_tensor_descale else None


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_every_kv_format_and_input_type(arch, name, dtype):
    kind = kv_format(name)
    kv_c, k_pe = rows(kind, 6, dtype)
    slots = torch.randperm(5 * 3)[:6]
    slots[2] = -1
    cos_sin = torch.rand(50, kind.rope).to(dtype)
    positions = torch.randint(0, 50, (6,), dtype=torch.int32)
    for interleaved in (True, False):
        mine, theirs = both(
            5, 3, name, kv_c, k_pe, slots, cos_sin, positions, descale=descale_of(kind), interleaved=interleaved
        )
        assert torch.equal(mine, theirs)
    mine, theirs = both(5, 3, name, kv_c, k_pe, slots.int(), descale=descale_of(kind), padded=False)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_any_bits(arch, name):
    """Random fp32 patterns: denormals, both zeros, every exponent, values that saturate. NaN and inf apart."""
    kind = kv_format(name)
    bits = torch.randint(-(2**31), 2**31, (16, kind.head_dim), dtype=torch.int64).to(torch.int32)
    bits[:8] = (bits[:8] & 0x8007FFFF - (1 << 32)) | torch.randint(107, 137, bits[:8].shape, dtype=torch.int32) << 23
    bits[0] = torch.arange(kind.head_dim, dtype=torch.int32) * 0x80000 + 0x3A000000  # ties of every encoding
    bits[1, ::2] = -(2**31)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, 1.0)
    mine, theirs = both(4, 4, name, values[:, : kind.latent], values[:, kind.latent :], torch.arange(16))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_nan_and_infinity(arch, name, dtype):
    kind = kv_format(name)
    kv_c, k_pe = rows(kind, 4, dtype)
    kv_c[0, 3], kv_c[1, 200], kv_c[1, 5] = torch.nan, torch.inf, -torch.inf
    k_pe[0, 1], k_pe[2, 7] = torch.nan, torch.inf
    caches_left = []
    for native_too in (True, False):
        cache = filled(kind, 1, 4)
        call = (kv_c, k_pe, cache, torch.arange(4), descale_of(kind))
        if native_too:
            mla_suite.append_kv(*call, kv_format=name)
        else:
            REFERENCE.run(None, (), *call, kv_format=name)
        caches_left.append(caches.unpack(kind, cache, descale=descale_of(kind)))
    mine, theirs = caches_left
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("tokens", [1, 8])
def test_slots_past_the_cache_write_nothing(arch, tokens):
    """A kernel skips what the CPU and debug mode refuse, like a negative slot: no byte outside the cache is touched."""
    kind = kv_format("bf16")
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
    kind = kv_format("dsv4")
    kv_c, k_pe = rows(kind, tokens)
    slots = torch.randint(0, 5, (tokens,))
    with emulator.configured(order="reverse"):
        mine, theirs = both(2, 4, "dsv4", kv_c, k_pe, slots)
    assert torch.equal(mine, theirs)


def shared(arch, tokens, name, kv_c, k_pe, slots, pages):
    """Caches as the kernel leaves them at this number of tokens a workgroup, and as the reference does."""
    left = []
    for run in (lambda *call, **given: NATIVE.run(AppendConfig(arch, tokens), (), *call, **given), None):
        cache = filled(kv_format(name), pages, 4)
        call = (kv_c, k_pe, cache, slots, descale_of(kv_format(name)))
        if run is None:
            REFERENCE.run(None, (), *call, kv_format=name)
        else:
            run(*call, kv_format=name)
        left.append(raw(cache))
    return left


@pytest.mark.parametrize("tokens", [2, 8, 45])
@pytest.mark.parametrize("name", ["bf16", "fp8_fnuz", "v32", "dsv4"])
def test_several_tokens_to_a_workgroup(arch, name, tokens):
    slots = torch.randint(-2, 24, (45,))
    assert torch.equal(*shared(arch, tokens, name, *rows(kv_format(name), 45), slots, 6))


@pytest.mark.parametrize("tokens", [1, 45])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_rows_in_whole_octets(arch, name, dtype, tokens):
    """Any finite 16-bit value, rotated both ways, several rows to a wave; skipped tokens may have any position."""
    kind = kv_format(name)
    bits = torch.randint(-(2**15), 2**15, (45, kind.head_dim), dtype=torch.int64).to(torch.int16)
    values = bits.view(dtype)
    values = torch.where(values.isfinite(), values, 1.0)
    values[::2] = torch.randn(23, kind.head_dim).to(dtype)
    slots = torch.randint(-2, 24, (45,))
    cos_sin = torch.rand(9, kind.rope).to(torch.float32 if tokens == 1 else dtype)
    positions = torch.where(slots < 0, 2**60, torch.arange(45) % 9)
    for interleaved in (True, False):
        left = []
        for run in (NATIVE.run, REFERENCE.run):
            cache = filled(kind, 6, 4)
            call = (
                values[:, : kind.latent],
                values[:, kind.latent :],
                cache,
                slots,
                descale_of(kind),
                cos_sin,
                positions,
            )
            config = AppendConfig(arch, tokens) if run == NATIVE.run else None
            run(config, (), *call, kv_format=name, interleaved=interleaved)
            left.append(raw(cache))
        assert torch.equal(*left)


def test_as_many_tokens_to_a_workgroup_as_it_takes(arch):
    """Distinct slots, of which several share a chain of the table; and a few slots over and over, in two workgroups."""
    chains, tokens = 512, 3 * MAX_TOKENS // 2
    kv_c, k_pe = torch.randn(tokens, 6), torch.randn(tokens, 2)
    for slots in (torch.arange(tokens) * (chains // 4), torch.randperm(4 * tokens)[:tokens], torch.arange(tokens) % 7):
        slots = slots.int()
        left = []
        for run in (NATIVE.run, REFERENCE.run):
            cache = torch.full((int(slots.max()) // 64 + 1, 64, 8), 7.0).bfloat16()
            config = AppendConfig(arch, MAX_TOKENS) if run == NATIVE.run else None
            run(config, (), kv_c, k_pe, cache, slots, kv_format="bf16")
            left.append(cache)
        assert torch.equal(*left)


def test_many_tokens_share_workgroups():
    gfx950 = archs.get("gfx950")
    most = MAX_TOKENS
    for tokens, group in ((1, 1), (128, 1), (2048, 1), (2049, 9), (8192, 32), (256 * most, most), (10**6, most)):
        inputs = torch.empty(tokens, 512, device="meta"), torch.empty(tokens, 64, device="meta")
        slots = torch.empty(tokens, dtype=torch.int64, device="meta")
        problem = APPEND_KV.problem(*inputs, filled(kv_format("bf16"), 2, 4), slots, kv_format="bf16")
        answer = NATIVE.supports(problem, gfx950)
        if isinstance(answer, dispatch.Unsupported):
            pytest.skip(answer.reason)
        assert answer.config.tokens == group


@pytest.mark.parametrize("latent", [1, 127, 512, 700])
def test_dense_rows_of_any_width(arch, latent):
    kv_c, k_pe = torch.randn(3, latent), torch.randn(3, 18)
    caches_left = []
    for native_too in (True, False):
        cache = torch.full((2, 2, latent + 18), 7.0).bfloat16()
        if native_too:
            mla_suite.append_kv(kv_c, k_pe, cache, torch.tensor([3, 0, 2]), kv_format="bf16")
        else:
            REFERENCE.run(None, (), kv_c, k_pe, cache, torch.tensor([3, 0, 2]), kv_format="bf16")
        caches_left.append(cache)
    assert torch.equal(*caches_left)


def test_strided_inputs_and_a_slice_of_pages(arch):
    kind = kv_format("v32")
    joined = torch.randn(4, 700).bfloat16()
    kv_c, k_pe = joined[:, 20:532], joined[:, 600:664]
    left = []
    for native_too in (True, False):
        cache = filled(kind, 6, 3)
        call = (kv_c, k_pe, cache[2:5], torch.tensor([8, 0, 4, 5]))
        if native_too:
            mla_suite.append_kv(*call, kv_format="v32")
        else:
            REFERENCE.run(None, (), *call, kv_format="v32")
        left.append(raw(cache))
    assert torch.equal(*left)


def test_an_empty_batch_launches_nothing(arch):
    kind = kv_format("bf16")
    cache = filled(kind, 1, 4)
    with emulator.configured(collect=True) as reports:
        mla_suite.append_kv(
            torch.empty(0, 512), torch.empty(0, 64), cache, torch.empty(0, dtype=torch.int64), kv_format="bf16"
        )
    assert not reports
    assert bool((raw(cache) == 0xAA).all())


def test_refusals_are_sentences(monkeypatch):
    kind = kv_format("v32")
    room = torch.empty(2 * 656 * 4 + 1, dtype=torch.uint8)
    odd = room[1:].as_strided((2, 4, 656), (656 * 4, 656, 1))
    kv_c, k_pe = rows(kind, 2)
    problem = APPEND_KV.problem(kv_c, k_pe, odd, torch.arange(2), kv_format="v32")
    answer = NATIVE.supports(problem, archs.get("gfx950"))
    assert isinstance(answer, dispatch.Unsupported)
    assert "aligned to 1 bytes; kv_format v32 needs 4" in answer.reason
    monkeypatch.setattr(launcher, "has_kernel", lambda arch, instance: False)
    even = APPEND_KV.problem(kv_c, k_pe, filled(kind, 2, 4), torch.arange(2), kv_format="v32")
    answer = NATIVE.supports(even, archs.get("gfx950"))
    assert isinstance(answer, dispatch.Unsupported)
    assert "python -m mla_suite build" in answer.reason
