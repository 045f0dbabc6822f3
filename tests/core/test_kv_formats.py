"""KVFormats: every byte where the formats say it is, pack and unpack inverse, bad caches refused in a sentence."""

import dataclasses
import importlib.util
import json
import struct

import pytest
import torch
from hostile_inputs import raw
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_suite.__main__ import main
from mla_suite.kv_formats import KV_FORMATS, Field, ScaleRule, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import encode as encode_module
from mla_suite.kv_formats.encode import ELEMENT_DTYPES, decode, encode, tile_scales

NAMES = tuple(KV_FORMATS)
few = settings(max_examples=60, deadline=None, derandomize=True)


def descale_of(one, value=0.037):
    return torch.tensor([value]) if one.per_tensor_descale else None


def representable(one, pages, page, seed):
    """Rows a writer stores exactly: stored elements times a scale of few significant bits, every tile at its largest.

    Scales of `v32` have 20 bits at most: then 448 * scale is exact in fp32 and the writer finds the scale again.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(pages, page, one.head_dim, generator=generator) * 3
    parts = rows.split([field.count for field in one.value_fields], dim=-1)
    rows = torch.cat([stored(part, f.encoding) for part, f in zip(parts, one.value_fields, strict=True)], dim=-1)
    rule = one.scale_rule
    if rule is not None:
        tiles = rows[..., : one.scaled].unflatten(-1, (-1, rule.tile))
        tiles[..., 0] = rule.divisor
        exponent = torch.randint(-12, 13, tiles.shape[:-1], generator=generator)
        mantissa = torch.randint(2**19, 2**20, exponent.shape, generator=generator)
        significand = torch.ones_like(exponent) if rule.power_of_two else mantissa
        tiles *= stored(torch.ldexp(significand.float(), exponent), one.by_name["scale"].encoding)[..., None]
    return rows


def stored(values, encoding):
    """`values` as the encoding keeps them, flattened or not."""
    return decode(encode(values, encoding), encoding)


@few
@given(st.sampled_from(NAMES), st.integers(1, 4), st.sampled_from((1, 2, 5, 16)), st.integers(0, 10**6), st.booleans())
def test_pack_then_unpack_is_identity_on_representable_rows(name, pages, page, seed, padded):
    one = get_kv_format(name)
    rows = representable(one, pages, page, seed)
    descale = descale_of(one, 0.25)
    if descale is not None:
        rows = rows * descale
    cache = caches.pack(one, rows, descale=descale, padded=padded)
    assert torch.equal(caches.unpack(one, cache, descale=descale), rows)
    assert caches.validate(one, cache) == ()


@few
@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_quantisation_error_is_within_half_a_step(name, seed, size):
    one = get_kv_format(name)
    scale_encoding = one.by_name["scale"].encoding if one.scale_rule else ""
    if scale_encoding == "e4m3fn":
        size = min(size, 300.0)  # larger rows have scales beyond 448, which saturate
    rows = torch.randn(2, 3, one.head_dim, generator=torch.Generator().manual_seed(seed)) * size
    largest = rows.abs().amax()
    descale = (largest / 200)[None] if one.per_tensor_descale else None
    back = caches.unpack(one, caches.pack(one, rows, descale=descale), descale=descale)
    latent = slice(0, one.scaled or one.latent)
    encoding = one.by_name["latent"].encoding
    relative = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 0.0, "e4m3fn": 2**-4, "e4m3fnuz": 2**-4, "e2m1": 2**-2}[encoding]
    absolute = {"fp16": 2.0**-25, "e4m3fn": 2.0**-10, "e4m3fnuz": 2.0**-11, "e2m1": 2.0**-2}.get(encoding, 0.0)
    if one.scale_rule is not None:
        scale = stored(tile_scales(rows[..., latent], one.scale_rule), scale_encoding)
        scale = scale.repeat_interleave(one.scale_rule.tile, dim=-1)
    else:
        scale = 1.0 if descale is None else descale
    error = (back - rows)[..., latent].abs()
    slack = 1 + 2**-20  # the fp32 division and multiplication around the rounding
    assert (error <= (relative * rows[..., latent].abs() + absolute * scale) * slack).all()


@pytest.mark.parametrize("encoding", ["e4m3fn", "e4m3fnuz", "e8m0"])
def test_byte_tables_equal_torch(encoding):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(ELEMENT_DTYPES[encoding]).float()
    assert torch.equal(decode(codes, encoding).nan_to_num(nan=-1e30), expected.nan_to_num(nan=-1e30))


@pytest.mark.parametrize(("encoding", "largest"), [("e4m3fn", 448.0), ("e4m3fnuz", 240.0)])
def test_fp8_saturates_and_keeps_nan(encoding, largest):
    stored = encode(torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, -1e-9]), encoding).float()
    assert stored[:4].tolist() == [largest, -largest, largest, -largest]
    assert stored[4].isnan()
    assert stored[5] == 0


@pytest.mark.parametrize("power", range(-20, 20))
def test_power_of_two_scales_are_exact_at_the_powers(power):
    rule = get_kv_format("dsv4").scale_rule
    exact = 448.0 * 2.0**power
    rows = torch.zeros(2, 64)
    rows[:, 0] = torch.tensor([exact, torch.tensor(exact).nextafter(torch.tensor(torch.inf))])
    at, above = tile_scales(rows, rule)[:, 0].tolist()
    assert at == max(2.0**power, 2.0**-13)
    assert above == max(2.0 ** (power + 1), 2.0**-13)


@pytest.mark.parametrize("name", [name for name in NAMES if KV_FORMATS[name].scale_rule])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_tile_with_a_non_finite_value_reads_nan_and_no_other_does(name, bad):
    one = get_kv_format(name)
    rows = torch.full((1, 2, one.head_dim), one.scale_rule.divisor)  # every scale is 1
    rows[0, 1, one.scale_rule.tile + 3] = bad
    cache = caches.pack(one, rows)
    back = caches.unpack(one, cache)
    tile = slice(one.scale_rule.tile, 2 * one.scale_rule.tile)
    assert back[0, 1, tile].isnan().all()
    back[0, 1, tile] = one.scale_rule.divisor
    assert torch.equal(back, torch.full_like(back, one.scale_rule.divisor))
    assert "first at page 0 offset 1" in caches.validate(one, cache)[-1]


@few
@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.booleans())
def test_gather_scatter_and_page_permutation(name, seed, padded):
    one = get_kv_format(name)
    generator = torch.Generator().manual_seed(seed)
    pages, page = 5, 3
    rows = torch.randn(pages, page, one.head_dim, generator=generator)
    descale = descale_of(one)
    cache = caches.pack(one, rows, descale=descale, padded=padded)
    read = caches.unpack(one, cache, descale=descale)
    slots = torch.randint(0, pages * page, (17,), generator=generator)
    assert torch.equal(caches.gather(one, cache, slots, descale=descale), read.flatten(0, 1)[slots])
    order = torch.randperm(pages, generator=generator)
    moved = cache.view(torch.uint8)[order].view(cache.dtype)  # torch 2.9 does not index float8
    assert torch.equal(caches.unpack(one, moved, descale=descale), read[order])
    written = caches.empty(one, pages, page, padded=padded)
    raw(written).fill_(0xAA)
    distinct = torch.randperm(pages * page, generator=generator)[:7]
    caches.scatter(one, written, distinct, rows.flatten(0, 1)[distinct], descale=descale)
    expected = torch.full_like(raw(written), 0xAA)
    stride = written.stride(0) * written.element_size()
    for slot in distinct.tolist():
        for field in one.fields:
            first = slot // page * stride + field.start(slot % page, page)
            expected[first : first + field.bytes] = raw(cache)[first : first + field.bytes]
    assert torch.equal(raw(written), expected)


@pytest.mark.parametrize("name", NAMES)
def test_constants_place_every_field(name):
    one = get_kv_format(name)
    values = one.constants()
    assert all(type(value) is int for value in values.values())
    for field in one.fields:
        prefix = f"KV_{field.name.upper()}_"
        page, token = 7, 5
        place = page * values[prefix + "PER_BLOCK"] + token * values[prefix + "STRIDE"] + values[prefix + "OFFSET"]
        assert place == field.start(token, page)
    if one.scale_rule is not None:
        (smallest,) = struct.unpack("<f", struct.pack("<I", values["KV_SCALE_SMALLEST_BITS"]))
        assert smallest == pytest.approx(one.scale_rule.smallest, rel=1e-7)


def test_dense_kv_formats_take_any_row():
    one = get_kv_format("bf16").sized(24, 8)
    assert (one.head_dim, one.token_bytes, one.by_name["rope"].offset) == (32, 64, 48)
    rows = torch.randn(2, 3, 32).bfloat16()
    assert torch.equal(caches.unpack("bf16", rows), rows.float())
    with pytest.raises(ValueError, match="'dsv4' holds 448 latent and 64 rope values, not 512 and 64"):
        get_kv_format("dsv4").sized(512, 64)


def test_validate_finds_what_is_wrong():
    cache = caches.pack("v32", torch.randn(2, 4, 576))
    assert caches.validate("v32_pow2", cache)[0].startswith("scale is not a power of two in 8 of 8 tokens")
    cache[1, 2, 512:516] = torch.tensor([-1.0]).view(torch.uint8)
    cache[1, 3, 0] = 0x7F
    problems = caches.validate("v32", cache)
    assert problems == (
        "latent is not finite in 1 of 8 tokens, first at page 1 offset 3",
        "scale is not positive and finite in 1 of 8 tokens, first at page 1 offset 2",
    )


BAD_CACHES = {
    "rank": (lambda: torch.zeros(2, 656, dtype=torch.uint8), "3 dimensions"),
    "dtype": (
        lambda: torch.zeros(2, 4, 656, dtype=torch.int8),
        "is int8; kv_format 'v32' takes uint8 or float8_e4m3fn",
    ),
    "flavour": (lambda: torch.zeros(2, 4, 656, dtype=torch.uint8).view(torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    "width": (lambda: torch.zeros(2, 4, 576, dtype=torch.uint8), r"takes \[num_pages, page_size, 656\]"),
    "token stride": (lambda: torch.zeros(2, 4, 672, dtype=torch.uint8)[..., :656], "exactly 656 elements apart"),
    "last stride": (lambda: torch.zeros(2, 4, 1312, dtype=torch.uint8)[..., ::2], "last dimension must be contiguous"),
    "expanded": (lambda: torch.zeros(1, 4, 656, dtype=torch.uint8).expand(2, 4, 656), "must not overlap"),
    "overlap": (
        lambda: torch.zeros(9 * 656, dtype=torch.uint8).as_strided((2, 4, 656), (3 * 656, 656, 1)),
        "blocks of 4 tokens must not overlap, so the first is at least 2624",
    ),
    "block stride": (
        lambda: torch.zeros(2 * 2632, dtype=torch.uint8).as_strided((2, 4, 656), (2632, 656, 1)),
        "multiple of 16 bytes apart",
    ),
}


@pytest.mark.parametrize("case", BAD_CACHES)
def test_bad_caches_are_refused_in_a_sentence(case):
    make, sentence = BAD_CACHES[case]
    with pytest.raises((ValueError, TypeError), match=f"^decode: kv_cache .*{sentence}"):
        caches.check(get_kv_format("v32"), make(), 576, op="decode", argument="kv_cache")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: caches.pack("bf16", torch.zeros(4, 576)), r"pack: rows has shape \(4, 576\); .*, head_dim\]"),
        (lambda: caches.pack("v32", torch.zeros(2, 4, 512)), r"kv_format 'v32' takes \[num_pages, page_size, 576\]"),
        (lambda: caches.pack("bf16", torch.zeros(2, 4, 576), descale=torch.tensor(2.0)), "only fp8, fp8_fnuz read"),
        (lambda: caches.unpack("v32", torch.zeros(2, 4, 656)), "unpack: cache is float32; it takes uint8"),
        (
            lambda: caches.unpack("v32", torch.zeros(2, 4, 655, dtype=torch.uint8)),
            r"takes \[num_pages, page_size, 656\]",
        ),
        (lambda: caches.unpack("bf16", torch.zeros(4, 576).bfloat16()), "unpack: cache has shape"),
        (lambda: caches.pack("fp8", torch.ones(1, 2, 8), descale=torch.tensor(0.0)), "pack: descale is 0"),
        (lambda: caches.pack("fp8", torch.ones(1, 2, 8), descale=torch.tensor(torch.nan)), "pack: descale is nan"),
        (lambda: caches.validate("v41", torch.zeros(2, 4, 576).bfloat16()), "validate: cache is bfloat16"),
        (lambda: caches.validate("bf16", torch.zeros(2, 4, 656, dtype=torch.uint8)), "validate: cache is uint8"),
        (lambda: caches.validate("v41", torch.zeros(2, 528, dtype=torch.uint8)), "validate: cache has shape"),
        (lambda: caches.validate("v41", torch.zeros(2, 4, 584, dtype=torch.uint8)), "validate: cache has shape"),
    ],
)
def test_what_is_no_cache_is_neither_packed_unpacked_nor_validated(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fields": (Field("latents", "bf16", 576, 0, 1152),)}, "its fields are latents; it has latent, and at most"),
        ({"fields": (Field("latent", "bf16", 64, 0, 128),) * 2}, "its fields are latent, latent; it has latent"),
        ({"scale_rule": None}, "it has a scale field or a scale_rule alone; declare both or neither"),
        ({"head_dim_v": 577}, "head_dim_v is 577; V is 1 to all 576 values"),
        ({"dtypes": ("float32",), "fields": (Field("latent", "bf16", 511, 0, 1022),), "scale_rule": None},
         "tokens of 1022 bytes are no whole elements"),
        ({"scale_rule": ScaleRule(256, 448.0, 1e-4, False)}, "4 scales of 256 values each are not those"),
        ({"fields": (Field("latent", "e4m3fn", 512, 0, 656), Field("scale", "fp32", 4, 512, 656),
                     Field("rope", "bf16", 64, 512, 656))}, "byte 512 of a block of 1 token is in rope and in another"),
        ({"fields": (Field("latent", "e4m3fn", 512, 0, 656), Field("scale", "fp32", 4, 512, 656),
                     Field("rope", "bf16", 64, 544, 656))}, "byte 528 of a block of 1 token is in no field"),
        ({"fields": (Field("latent", "e4m3fn", 512, 0, 512), Field("scale", "fp32", 4, 0, 32, 512))},
         "byte 1040 of a block of 2 tokens is in no field"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_read_back_is_refused_where_it_is_declared(changed, message):
    with pytest.raises(ValueError, match=f"kv_format 'v32': {message}"):
        dataclasses.replace(get_kv_format("v32"), **({"head_dim_v": 64} | changed))


def test_a_field_of_an_unknown_encoding_is_refused():
    with pytest.raises(ValueError, match="field latent: encoding int8; possible are bf16, fp16"):
        Field("latent", "int8", 512, 0, 512)


def test_an_import_under_another_default_device_changes_nothing():
    spec = importlib.util.spec_from_file_location("mla_suite.kv_formats.encode_again", encode_module.__file__)
    again = importlib.util.module_from_spec(spec)
    with torch.device("meta"):
        spec.loader.exec_module(again)
    assert again.decode(torch.tensor([56, 64], dtype=torch.uint8), "e4m3fn").tolist() == [1.0, 2.0]


def test_command_prints_every_kv_format(capsys):
    assert main(["formats", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == list(NAMES)
    assert facts["dsv4"]["block_bytes"] == 37440
    assert main(["formats", "dsv4", "--page-size", "2", "--constants"]) == 0
    text = capsys.readouterr().out
    assert "1728 bytes, of which 560 are padding" in text
    assert "P*576 + t*8" in text
    assert "-DKV_LATENT_COUNT=448" in text
    assert main(["formats", "v41", "--window", "5"]) == 2
    assert capsys.readouterr().err == "formats: --window counts the tokens that a GiB holds: add --context\n"
    assert main(["formats", "nope"]) == 2
    assert "kv_format 'nope' is unknown" in capsys.readouterr().err
