"""append_kv: exactly the declared bytes, rotation, skipped and repeated slots, errors before a byte is written."""

import math
import struct

import pytest
import torch
from hostile_inputs import filled, fused_pairs, raw
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_suite
from mla_suite import archs
from mla_suite.archs.sm_90 import Kernels
from mla_suite.archs.sm_90.append_kv import BULK_BYTES, RECORD_BULK_BYTES
from mla_suite.build.instances import instances
from mla_suite.core.register import get
from mla_suite.kv_formats import KV_FORMATS, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.append_kv.samples import sample

NAMES = tuple(KV_FORMATS)
few = settings(max_examples=40, deadline=None, derandomize=True)


def new_tokens(one, tokens, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, one.head_dim, generator=generator) * 4
    return rows[:, : one.latent].to(dtype), rows[:, one.latent :].to(dtype)


def descale_of(one):
    return torch.tensor([0.03125]) if one.per_tensor_descale else None


def e4m3(value, fnuz):
    """The byte of the nearest e4m3 value, ties to even, from the definition of the format and nothing else."""
    bias, largest = (8, 0x7F) if fnuz else (7, 0x7E)

    def magnitude(code):
        exponent, mantissa = code >> 3, code & 7
        return math.ldexp(mantissa, -2 - bias) if exponent == 0 else math.ldexp(8 + mantissa, exponent - bias - 3)

    codes = range(largest + 1)
    code = min(codes, key=lambda c: (abs(magnitude(c) - abs(value)), c & 1))
    negative = math.copysign(1, value) < 0 and not (fnuz and code == 0)
    return code | (0x80 if negative else 0)


def v32_record(row, power_of_two):
    """{offset in the block: byte} of token 0 of a V3.2 block."""
    written = {}
    for tile in range(4):
        values = row[tile * 128 : tile * 128 + 128]
        amax = max(abs(v) for v in values)
        ratio = struct.unpack("<f", struct.pack("<f", amax / 448))[0]
        scale = 2.0 ** math.ceil(math.log2(max(ratio, 1e-4))) if power_of_two else max(ratio, 2.0**-126)
        written |= {512 + 4 * tile + i: byte for i, byte in enumerate(struct.pack("<f", scale))}
        quotients = torch.tensor(values) / torch.tensor(scale)  # one fp32 division, as the rule says
        written |= {tile * 128 + i: e4m3(q, False) for i, q in enumerate(quotients.tolist())}
    rope = torch.tensor(row[512:]).bfloat16().view(torch.uint8).tolist()
    return written | {528 + i: byte for i, byte in enumerate(rope)}


def dsv4_record(row, fnuz, page, token):
    """{offset in the block: byte} of one token of a V4 block of `page` tokens."""
    written = {page * 576 + token * 8 + 7: 0}
    for tile in range(7):
        values = row[tile * 64 : tile * 64 + 64]
        exponent = math.ceil(math.log2(max(max(abs(v) for v in values) / (224 if fnuz else 448), 1e-4)))
        written[page * 576 + token * 8 + tile] = exponent + 127
        written |= {token * 576 + tile * 64 + i: e4m3(math.ldexp(v, -exponent), fnuz) for i, v in enumerate(values)}
    rope = torch.tensor(row[448:]).bfloat16().view(torch.uint8).tolist()
    return written | {token * 576 + 448 + i: byte for i, byte in enumerate(rope)}


@pytest.mark.parametrize(
    ("name", "page", "padded", "block"),
    [
        *((name, 5, True, 5 * 656) for name in ("v32", "v32_pow2")),
        *((name, 2, False, 1168) for name in ("dsv4", "dsv4_fnuz")),
        *(
            (name, page, True, block)
            for name in ("dsv4", "dsv4_fnuz")
            for page, block in ((2, 1728), (64, 37440), (256, 149760))
        ),
    ],
)
def test_a_record_writes_exactly_the_declared_bytes(name, page, padded, block):
    kv_c, k_pe = new_tokens(get_kv_format(name), 2)
    cache = filled(get_kv_format(name), 3, page, padded=padded)
    mla_suite.append_kv(kv_c, k_pe, cache, torch.tensor([2 * page + 1, page - 1]), kv_format=name)
    expected = bytearray(b"\xaa" * (3 * block))
    for token, (where, at) in enumerate([(2, 1), (0, page - 1)]):
        row = torch.cat([kv_c[token], k_pe[token]]).tolist()
        if name.startswith("v32"):
            record = {at * 656 + offset: byte for offset, byte in v32_record(row, name == "v32_pow2").items()}
        else:
            record = dsv4_record(row, name == "dsv4_fnuz", page, at)
        for offset, byte in record.items():
            expected[where * block + offset] = byte
    assert bytes(raw(cache).tolist()) == bytes(expected)


@pytest.mark.parametrize("name", ["fp8", "fp8_fnuz"])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_fp8_divides_by_the_descale_and_saturates(name, as_bytes):
    one = get_kv_format(name)
    kv_c, k_pe = new_tokens(one, 3, dtype=torch.float32)
    kv_c[0, 0], kv_c[0, 1] = 1e6, -1e6
    descale = torch.tensor(0.0371)
    cache = filled(one, 1, 3)
    given = cache.view(torch.uint8) if as_bytes else cache
    mla_suite.append_kv(kv_c, k_pe, given, torch.arange(3), descale, kv_format=name)
    quotients = torch.cat([kv_c, k_pe], dim=1) / descale
    expected = [e4m3(q, name == "fp8_fnuz") for q in quotients.flatten().tolist()]
    assert raw(cache).tolist() == expected


@few
@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_appending_in_pieces_equals_packing_the_whole(name, seed, pieces):
    one = get_kv_format(name)
    tokens, page = sum(pieces), 4
    pages = -(-tokens // page)
    kv_c, k_pe = new_tokens(one, pages * page, seed)
    rows = torch.cat([kv_c, k_pe], dim=1).view(pages, page, -1)
    packed = caches.pack(one, rows, descale=descale_of(one))
    cache = filled(one, pages, page, byte=0)
    generator = torch.Generator().manual_seed(seed)
    start = 0
    for count in [*pieces, pages * page - tokens]:
        slots = start + torch.randperm(count, generator=generator)
        dtype = torch.int32 if seed % 2 else torch.int64
        mla_suite.append_kv(kv_c[slots], k_pe[slots], cache, slots.to(dtype), descale_of(one), kv_format=name)
        start += count
    assert torch.equal(raw(cache), raw(packed))


@few
@given(st.sampled_from(NAMES), st.lists(st.integers(-3, 11), max_size=30), st.integers(0, 10**6))
def test_negative_slots_skip_and_the_last_of_equal_slots_stays(name, slots, seed):
    one = get_kv_format(name)
    kv_c, k_pe = new_tokens(one, len(slots), seed)
    given_bytes = [tensor.clone() for tensor in (kv_c, k_pe)]
    cache, expected = filled(one, 4, 3), filled(one, 4, 3)
    mla_suite.append_kv(kv_c, k_pe, cache, torch.tensor(slots, dtype=torch.int64), descale_of(one), kv_format=name)
    for token, slot in enumerate(slots):
        single = slice(token, token + 1)
        if slot >= 0:
            mla_suite.append_kv(
                kv_c[single], k_pe[single], expected, torch.tensor([slot]), descale_of(one), kv_format=name
            )
    assert torch.equal(raw(cache), raw(expected))
    assert all(torch.equal(now, then) for now, then in zip((kv_c, k_pe), given_bytes, strict=True))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp32", "v32", "dsv4"])
def test_rotation_against_complex_numbers(name, interleaved):
    one = get_kv_format(name)
    kv_c, k_pe = new_tokens(one, 6)
    angles = torch.arange(40, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(32, dtype=torch.float64) / 32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    positions = torch.tensor([39, 0, 7, 7, 31, 10**6])  # the last is out of range, but its token is skipped
    slots = torch.tensor([5, 1, 0, 3, 2, -1])
    cache = filled(one, 2, 3, byte=0)
    mla_suite.append_kv(kv_c, k_pe, cache, slots, None, cos_sin, positions, kv_format=name, interleaved=interleaved)
    pairs = k_pe[:5].double().unflatten(1, (32, 2) if interleaved else (2, 32))
    a, b = (pairs[..., 0], pairs[..., 1]) if interleaved else (pairs[:, 0], pairs[:, 1])
    table = torch.complex(*cos_sin.double()[positions[:5]].chunk(2, dim=1))
    turned = torch.complex(a, b) * table
    exact = torch.stack([turned.real, turned.imag], dim=-1 if interleaved else 1).flatten(1)
    stored = caches.unpack(one, cache).flatten(0, 1)[slots[:5]][:, one.latent :].double()
    size = torch.hypot(a, b).repeat_interleave(2, 1) if interleaved else torch.hypot(a, b).repeat(1, 2)
    rounding = 2**-8 * exact.abs() if name != "fp32" else 0
    assert ((stored - exact).abs() <= rounding + 2**-22 * size).all()


def by_vllms_cuda_writer(rows, angles, positions):
    """Bytes [tokens, 528] of 16-bit rows [tokens, 512], as vLLM 0.33's CUDA operator writes them for a window: its last
    64 values are rotated, all are rounded to 16 bits, and scales chosen for these. numpy's long double holds sums."""
    cos, sin = (half.numpy() for half in angles[positions].chunk(2, dim=1))
    a, b = rows[:, 448::2].float().numpy(), rows[:, 449::2].float().numpy()
    first = (a.astype("longdouble") * cos - b * sin).astype("float32")
    second = (a.astype("longdouble") * sin + b * cos).astype("float32")
    rope = torch.stack([torch.from_numpy(first), torch.from_numpy(second)], dim=2).flatten(1)
    values = torch.cat([rows[:, :448], rope.to(rows.dtype)], dim=1).float().unflatten(1, (16, 32))
    exponents = (values.abs().amax(dim=2).clamp(min=1e-4) / 448).log2().ceil()
    codes = (values * torch.exp2(-exponents)[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat([codes.flatten(1).view(torch.uint8), (exponents + 127).to(torch.uint8)], dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_v41_vllm_is_what_vllms_cuda_writer_stores(dtype):
    """Byte for byte; some pairs are such that a sum of two rounded products is not the fused one."""
    draw = torch.Generator().manual_seed(33)
    tokens = 300
    rows = (torch.randn(tokens, 512, generator=draw) * 2.0 ** torch.randint(-9, 9, (tokens, 1), generator=draw)).to(
        dtype
    )
    turn = torch.rand(tokens, 32, generator=draw) * 6.28
    angles, positions = torch.cat([turn.cos(), turn.sin()], dim=1), torch.randperm(tokens, generator=draw)
    a, b, cos, sin = (values.view(-1, 32) for values in fused_pairs(200 * 32, 33))
    rows[:200, 448::2], rows[:200, 449::2] = a.to(dtype), b.to(dtype)
    angles[positions[:200]] = torch.cat([cos, sin], dim=1)
    cache = caches.empty("v41_vllm", 5, 64)
    slots = torch.randperm(5 * 64, generator=draw)[:tokens]
    mla_suite.append_kv(rows[:, :448], rows[:, 448:], cache, slots, None, angles, positions, kv_format="v41_vllm")
    assert torch.equal(cache.flatten(0, 1)[slots], by_vllms_cuda_writer(rows, angles, positions))


def test_slots_beyond_two_gigabytes():
    one = get_kv_format("v32")
    cache = caches.empty(one, 55_000, 64)  # 2.3 GB of address space, of which one page is touched
    kv_c, k_pe = new_tokens(one, 1)
    slot = torch.tensor([55_000 * 64 - 1])
    mla_suite.append_kv(kv_c, k_pe, cache, slot, kv_format="v32")
    small = filled(one, 1, 1)
    mla_suite.append_kv(kv_c, k_pe, small, torch.tensor([0]), kv_format="v32")
    assert torch.equal(cache[-1, -1], small[0, 0])


def arguments(name="v32", tokens=3, pages=2, page=4, **changes):
    one = get_kv_format(name)
    kv_c, k_pe = new_tokens(one, tokens)
    given = {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "kv_cache": filled(one, pages, page),
        "slot_mapping": torch.arange(tokens),
        "kv_descale": None,
        "cos_sin": None,
        "positions": None,
        "kv_format": name,
    }
    return given | changes


TABLE = torch.zeros(8, 64)
BAD = {
    "kv_c rank": (
        lambda: arguments(kv_c=torch.zeros(3, 1, 512)),
        r"kv_c has shape \(3, 1, 512\); it takes 2 dimensions: \[tok",
    ),
    "kv_c dtype": (lambda: arguments(kv_c=torch.zeros(3, 512).double()), "kv_c is float64; it takes bfloat16, "),
    "kv_c width": (lambda: arguments(kv_c=torch.zeros(3, 448).bfloat16()), "kv_c has shape .* of kv_format 'v32'"),
    "kv_c stride": (
        lambda: arguments(kv_c=torch.zeros(3, 1024).bfloat16()[:, ::2]),
        r"kv_c has strides \(1024, 2\); its last dimension must be contiguous",
    ),
    "k_pe dtype": (lambda: arguments(k_pe=torch.zeros(3, 64)), "k_pe is float32; it takes bfloat16"),
    "k_pe tokens": (lambda: arguments(k_pe=torch.zeros(2, 64).bfloat16()), "k_pe has shape"),
    "k_pe width": (lambda: arguments(k_pe=torch.zeros(3, 32).bfloat16()), "k_pe has shape"),
    "kv_format": (lambda: arguments(kv_format="v4"), "kv_format 'v4' is unknown; the kv_formats are bf16"),
    "wrong kv_format": (lambda: arguments(kv_format="bf16"), "kv_cache is uint8; kv_format 'bf16' takes bfloat16"),
    "other flavour": (
        lambda: arguments("dsv4", kv_cache=torch.zeros(2, 4, 584, dtype=torch.uint8).view(torch.float8_e4m3fnuz)),
        "kv_cache is float8_e4m3fnuz; kv_format 'dsv4' takes uint8 or float8_e4m3fn",
    ),
    "misaligned": (
        lambda: arguments(kv_cache=torch.zeros(8 * 656 + 8, dtype=torch.uint8)[8:].view(2, 4, 656)),
        "kv_cache begins 8 bytes past a multiple of 16",
    ),
    "descale": (lambda: arguments(kv_descale=torch.ones(1)), "kv_descale was given with kv_format 'v32'"),
    "descale dtype": (lambda: arguments("fp8", kv_descale=torch.ones(1).double()), "kv_descale is float64"),
    "descale zero": (lambda: arguments("fp8", kv_descale=torch.zeros(1)), "kv_descale is 0; values are divided by it"),
    "descale negative": (lambda: arguments("fp8", kv_descale=torch.tensor(-0.5)), "kv_descale is -0.5"),
    "descale infinite": (lambda: arguments("fp8", kv_descale=torch.tensor([torch.inf])), "kv_descale is inf"),
    "descale NaN": (lambda: arguments("fp8", kv_descale=torch.tensor([torch.nan])), "kv_descale is nan"),
    "slots dtype": (lambda: arguments(slot_mapping=torch.zeros(3)), "slot_mapping is float32; it takes int32 or int64"),
    "slots length": (lambda: arguments(slot_mapping=torch.arange(4)), r"slot_mapping has shape \(4,\); it takes \[tok"),
    "slot too large": (
        lambda: arguments(slot_mapping=torch.tensor([0, 8, 1])),
        r"slot_mapping holds slot 8; the cache has slots 0\.\.7",
    ),
    "positions missing": (lambda: arguments(cos_sin=TABLE), "positions is missing although cos_sin is given"),
    "cos_sin missing": (lambda: arguments(positions=torch.arange(3)), "cos_sin is missing although positions"),
    "cos_sin width": (
        lambda: arguments(cos_sin=torch.zeros(8, 32), positions=torch.arange(3)),
        r"cos_sin has shape \(8, 32\); it takes \[max_len, rope\]",
    ),
    "rope odd": (
        lambda: arguments(
            "bf16",
            kv_c=torch.zeros(3, 513).bfloat16(),
            k_pe=torch.zeros(3, 63).bfloat16(),
            cos_sin=TABLE[:, :63].contiguous(),
            positions=torch.arange(3),
        ),
        "k_pe has 63 values; only an even number can be rotated in pairs",
    ),
    "position too large": (
        lambda: arguments(cos_sin=TABLE, positions=torch.tensor([0, 8, 1])),
        r"positions holds position 8; cos_sin has rows 0\.\.7",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_a_byte_is_written(case):
    make, sentence = BAD[case]
    given = make()
    before = raw(given["kv_cache"]).clone()
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        mla_suite.append_kv(**given)
    assert "\n" not in str(caught.value)
    assert torch.equal(raw(given["kv_cache"]), before)


def test_rows_under_way_have_the_memory_that_the_kernel_lays_out():
    declared = {entry.id: entry for entry in instances("sm_90")}
    for kv_format, room in (("bf16", BULK_BYTES), ("v41", RECORD_BULK_BYTES)):
        many = sample(5000, kv_format).make(torch.device("cpu"))
        found = Kernels(archs.get("sm_90")).append_kv(get("append_kv").problem(*many[0], **many[1])).config
        assert found.tokens > 1
        assert found.shared == declared[found.instance].dynamic_lds == room
