"""convert_kv: every pair of kv_formats and page sizes, without loss where the destination can hold the values."""

import pytest
import torch
from hostile_inputs import filled, raw

import mla_suite
from mla_suite import kv_formats
from mla_suite.kv_formats import KV_FORMATS
from mla_suite.kv_formats import cache as caches

RECORDS = [name for name, kind in KV_FORMATS.items() if not kind.dense]
PAIRS = [(a, b) for a in RECORDS for b in RECORDS if KV_FORMATS[a].head_dim == KV_FORMATS[b].head_dim]
FP8 = ("v41", "v41_interleaved", "v41_vllm")
FP4 = ("v41_fp4", "v41_fp4_interleaved")
COPIED = {(a, b) for alike in (FP8, FP4) for a in alike for b in alike} | {("v32_pow2", "v32")}


def rows(name, pages, page, seed=0):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(pages, page, KV_FORMATS[name].head_dim, generator=draw)
    return values * torch.randint(-12, 5, (pages, page, 1), generator=draw).float().exp2()


def converted(source, a, b, slots, targets, pages=3, page=5, width=512):
    kind = KV_FORMATS[b]
    made = filled(kind.sized(width, 0) if kind.dense else kind, pages, page)
    mla_suite.convert_kv(source, made, slots, targets, source_format=a, destination_format=b)
    return made


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_a_record_becomes_what_the_destination_would_store(a, b):
    """Tokens in another order and page size; a skipped one, and every byte beside those written, stays."""
    source = kv_formats.pack(a, rows(a, 4, 3))
    slots, targets = torch.tensor([11, 0, 7, -1, 2]), torch.tensor([1, 14, -2, 3, 8], dtype=torch.int32)
    found = converted(source, a, b, slots, targets)
    expected = filled(b, 3, 5)
    values = caches.gather(KV_FORMATS[a], source, slots[[0, 1, 4]])
    caches.scatter(KV_FORMATS[b], expected, targets[[0, 1, 4]].long(), values)
    if a == b or (a, b) in COPIED:
        stored = caches.fields_at(KV_FORMATS[a], source, slots[[0, 1, 4]])
        caches.put_fields(KV_FORMATS[b], expected, targets[[0, 1, 4]].long(), stored)
    assert torch.equal(raw(found), raw(expected))


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("through", ["fp32", "bf16"])
def test_dense_rows_hold_records_without_loss(name, through):
    """All but arbitrary fp32 scales in bf16. Back in the record they read as the same values, where that is its own."""
    kind = KV_FORMATS[name]
    if through == "bf16" and kind.by_name["scale"].encoding == "fp32" and not kind.scale_rule.power_of_two:
        pytest.skip("an fp32 scale has more bits than bf16")
    source = kv_formats.pack(name, rows(name, 2, 8, seed=3))
    slots = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    dense = converted(source, name, through, torch.arange(16), slots, 8, 2, kind.head_dim)
    assert torch.equal(caches.gather(KV_FORMATS[through], dense, slots), kv_formats.unpack(name, source).flatten(0, 1))
    if kind.scale_rule.power_of_two:
        back = converted(dense, through, name, slots, torch.arange(16), 2, 8)
        assert torch.equal(kv_formats.unpack(name, back), kv_formats.unpack(name, source))


@pytest.mark.parametrize(("a", "b"), [("v41", "v41_vllm"), ("v41_fp4_interleaved", "v41_fp4"), ("dsv4", "dsv4")])
def test_equal_records_keep_bytes_that_no_writer_makes(a, b):
    draw = torch.Generator().manual_seed(5)
    source = kv_formats.empty(a, 3, 4)
    raw(source).copy_(torch.randint(0, 256, raw(source).shape, dtype=torch.uint8, generator=draw))
    slots = torch.randperm(12, generator=draw)
    there = converted(source, a, b, torch.arange(12), slots, 4, 3)
    back = converted(there, b, a, slots, torch.arange(12), 3, 4)
    for name, field in KV_FORMATS[a].by_name.items():
        first, second = (caches.fields_at(KV_FORMATS[a], cache, torch.arange(12)) for cache in (source, back))
        assert all(torch.equal(first[key], second[key]) for key in first), (name, field)


def test_descales():
    """A plain fp8 cache is read and written with its own descale, and copied only where there is none."""
    values = rows("bf16", 2, 4)
    old, new = torch.tensor(0.25), torch.tensor([0.5])
    source = kv_formats.pack("fp8", values, descale=old)
    made = filled("fp8", 2, 4)
    call = (source, made, torch.arange(8), torch.arange(8))
    mla_suite.convert_kv(*call, old, new, source_format="fp8", destination_format="fp8")
    expected = kv_formats.pack("fp8", kv_formats.unpack("fp8", source, descale=old), descale=new)
    assert torch.equal(raw(made), raw(expected))
    mla_suite.convert_kv(*call, source_format="fp8", destination_format="fp8")
    assert torch.equal(raw(made), raw(source))


BAD = {
    "widths": (
        dict(destination_format="v32", destination="v32"),
        "destination holds rows of 576 values; those of source",
    ),
    "slots": (dict(source_slots=torch.tensor([0, 12])), "source_slots holds slot 12; source has slots 0..11"),
    "past": (
        dict(destination_slots=torch.tensor([15, 2])),
        "destination_slots holds slot 15; destination has slots 0..14",
    ),
    "twice": (dict(destination_slots=torch.tensor([2, 2])), "destination_slots holds slot 2 2 times"),
    "count": (dict(destination_slots=torch.tensor([2])), r"\[tokens\] of source_slots"),
    "descale": (dict(source_descale=torch.tensor(1.0)), "only fp8, fp8_fnuz read one"),
    "name": (dict(source_format="v42"), "kv_format 'v42' is unknown"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_come_before_a_byte_is_written(case):
    change, message = BAD[case]
    given = dict(source=kv_formats.pack("v41", rows("v41", 4, 3)), destination=filled("v41_fp4", 3, 5))
    given |= dict(source_slots=torch.tensor([0, 1]), destination_slots=torch.tensor([3, 4]))
    given |= dict(source_format="v41", destination_format="v41_fp4") | change
    if isinstance(given["destination"], str):
        given["destination"] = filled(given["destination"], 3, 5)
    with pytest.raises(ValueError, match=message):
        mla_suite.convert_kv(**given)
    assert (raw(given["destination"]) == 0xAA).all()


def test_a_cache_is_not_converted_within_its_own_memory():
    source = kv_formats.pack("v41", rows("v41", 4, 3))
    slots = torch.arange(3)
    names = dict(source_format="v41", destination_format="v41")
    with pytest.raises(ValueError, match="destination shares memory with source"):
        mla_suite.convert_kv(source, source, slots, slots + 3, **names)
