"""append_kv in Triton writes the reference's bytes, run by Triton's interpreter on the CPU."""

import itertools
from typing import Any

import pytest
import torch
from backend import CPU
from hostile_inputs import filled, fused_pairs, in_turn, raw

import mla_suite
from mla_suite.kv_formats import KV_FORMATS, get_kv_format
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.append_kv import AppendKvArgs
from mla_suite.ops.append_kv import triton as append
from mla_suite.ops.append_kv.samples import sample


def both(name: str, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    """The cache of three pages of five as the reference and as the kernel leave it, from bytes 0xAA."""
    kind = get_kv_format(name)
    sized = kind.sized(kv_c.shape[1], k_pe.shape[1]) if kind.dense else kind
    left = []
    for write in (mla_suite.append_kv, lambda *args, **options: append.run(None, (), AppendKvArgs(*args, **options))):
        cache = filled(sized, 3, 5)
        write(kv_c, k_pe, cache, slots, *rest, kv_format=name, **kwargs)
        left.append(cache)
    return left


def assert_same_bytes(pair: Any) -> None:
    assert torch.equal(raw(pair[1]), raw(pair[0]))


def tokens(name: str, count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    kind = get_kv_format(name)
    rows = (torch.randn(count, kind.head_dim, generator=torch.Generator().manual_seed(count)) * 4).to(dtype)
    return rows[:, : kind.latent], rows[:, kind.latent :]  # strided: neither part is contiguous


@pytest.mark.parametrize(("rope", "name"), in_turn(["as given", "interleaved", "halves"], KV_FORMATS))
def test_samples(name: str, rope: str) -> None:
    case = sample(9, name, page=3, rope=rope != "as given", interleaved=rope != "halves", skip=True)
    args, kwargs = case.make(CPU)
    mine = args[2].clone()
    mla_suite.append_kv(*args, **kwargs)
    append.run(None, (), AppendKvArgs(*args[:2], mine, *args[3:], **kwargs))
    assert torch.equal(mine, args[2])


@pytest.mark.parametrize(("dtype", "name"), in_turn([torch.bfloat16, torch.float16, torch.float32], KV_FORMATS))
def test_input_dtypes_and_repeated_slots(name: str, dtype: torch.dtype) -> None:
    slots = torch.tensor([4, 14, -1, 4, 0, 7, 4, -3], dtype=torch.int32)
    assert_same_bytes(both(name, *tokens(name, 8, dtype), slots))


def test_the_last_of_equal_slots_stays_however_far_it_is() -> None:
    count = 2 * append.LATER + 3
    slots = torch.full((count,), 2)
    slots[1 : append.LATER] = 9
    assert_same_bytes(both("fp8", *torch.randn(count, 8).split((6, 2), dim=1), slots))


@pytest.mark.parametrize("name", ["bf16", "dsv4", "v41_fp4"])
def test_programs_of_several_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "SINGLE_TOKENS", 0)
    slots = torch.tensor([4, 14, -1, 4, 0, 7, 4, -3, 3, 0, 11])
    assert_same_bytes(both(name, *tokens(name, len(slots)), slots))


def edges(name: str) -> torch.Tensor:
    """Every value of the encoding, every midpoint between neighbours, and what lies an ulp beside them."""
    if "fp8" in name:
        kind = torch.float8_e4m3fnuz if "fnuz" in name else torch.float8_e4m3fn
        values = torch.arange(256, dtype=torch.uint8).view(kind).float()
    else:
        kind = torch.bfloat16 if name == "bf16" else torch.float16
        picked = torch.randint(-(2**15), 2**15, (1500,), generator=torch.Generator().manual_seed(0))
        values = torch.cat((picked, torch.tensor([0, 1, 2, -(2**15), -(2**15) + 1]))).short().view(kind).float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    exact = torch.cat((values, middle, torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 464.0, 465.0, 248.0, 1e-42])))
    infinity = torch.tensor(torch.inf)
    return torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity)))


@pytest.mark.parametrize(
    ("name", "descale"), [("bf16", None), ("fp16", None), ("fp8", None), ("fp8_fnuz", None), ("fp8", 0.1)]
)
def test_rounding_at_every_edge(name: str, descale: float | None) -> None:
    values, factor = edges(name), None if descale is None else torch.tensor(descale)
    values = values if factor is None else values * factor  # a product with 1 / descale crosses some of the edges
    values = torch.cat((values, values.new_zeros(-values.numel() % 600))).view(-1, 600)
    for rows in values.split(15):
        assert_same_bytes(both(name, rows[:, :540], rows[:, 540:], torch.arange(len(rows)), factor))


@pytest.mark.parametrize("name", ["v32", "v32_pow2", "dsv4", "dsv4_fnuz", "v41", "v41_vllm", "v41_fp4"])
def test_scales_of_tiny_huge_and_exact_tiles(name: str) -> None:
    tile, divisor = get_kv_format(name).scale_rule.tile, get_kv_format(name).scale_rule.divisor
    kv_c, k_pe = tokens(name, 14, torch.float32)
    sizes = [0.0, 1e-45, 1e-39, 1e-5, 1e-4 * divisor, divisor, divisor * 2, divisor * 1.0000001, 3e38]
    sizes += [1e-20, 1, 7, 9, 11]
    kv_c = kv_c / kv_c.unflatten(1, (-1, tile)).abs().amax(-1).repeat_interleave(tile, 1)
    assert_same_bytes(both(name, kv_c * torch.tensor(sizes)[:, None], k_pe, torch.arange(14)))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_nan_and_infinity_stay_in_their_tile(name: str) -> None:
    kv_c, k_pe = tokens(name, 4, torch.float32)
    kv_c[0, 3], kv_c[1, 200], kv_c[2, -1], k_pe[3, 5:6] = torch.nan, torch.inf, -torch.inf, torch.nan
    reference, mine = both(name, kv_c, k_pe, torch.arange(4))
    kind = get_kv_format(name)
    read = [caches.gather(kind, cache, torch.arange(4)) for cache in (reference, mine)]
    torch.testing.assert_close(read[1], read[0], atol=0, rtol=0, equal_nan=True)
    assert torch.equal(raw(mine[1:].clone()), raw(reference[1:].clone()))


def test_zeros_keep_the_sign_that_rotation_gives_them() -> None:
    signs = torch.tensor(list(itertools.product((0.0, -0.0), repeat=2))).repeat(2, 1)
    cos_sin = torch.tensor([[1.0, -1.0]] * 4 + [[-1.0, 1.0]] * 4)
    slots = torch.arange(8)
    assert_same_bytes(both("fp32", signs, signs, slots, None, cos_sin, slots))


def test_rotation_of_records_multiplies_and_adds_in_one_rounding() -> None:
    a, b, cos, sin = (values.view(15, 32) for values in fused_pairs(15 * 32, 7))
    k_pe, slots = torch.stack([a, b], dim=2).flatten(1).bfloat16(), torch.arange(15)
    cos_sin = torch.cat([cos, sin], dim=1)
    assert_same_bytes(both("v41", torch.zeros(15, 448).bfloat16(), k_pe, slots, None, cos_sin, slots))


def test_angles_that_are_columns_of_a_wider_table() -> None:
    cos_sin, positions = torch.randn(9, 70)[:, 3:67], torch.tensor([8, 0, 5])
    assert_same_bytes(both("bf16", *tokens("bf16", 3), torch.arange(3), None, cos_sin, positions))


def test_other_widths_of_dense_rows() -> None:
    rows = torch.randn(5, 100)
    for latent in (1, 36, 100):
        assert_same_bytes(both("fp8", rows[:, :latent], rows[:, latent:], torch.arange(5), torch.tensor(0.1)))


def test_slots_past_the_cache_write_nothing() -> None:
    kv_c, k_pe = tokens("v32", 3)
    cache = caches.empty("v32", 3, 5)
    whole = torch.zeros(raw(cache).numel() * 2, dtype=torch.uint8)
    cache = whole[: raw(cache).numel()].view(3, 5, 656)
    slots = torch.tensor([15, 2**40, -(2**40)])
    append.run(None, (), AppendKvArgs(kv_c, k_pe, cache, slots, kv_format="v32"))
    assert not whole.any()


def test_no_tokens() -> None:
    assert_same_bytes(both("dsv4", *tokens("dsv4", 0), torch.zeros(0, dtype=torch.int64)))
