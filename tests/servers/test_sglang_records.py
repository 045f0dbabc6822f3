"""V4.1's records beside SGLang's torch oracle of them, byte for byte: `tox -e sglang`."""

import flash_mla_absent  # noqa: F401  # before SGLang
import pytest
import sglang_cpu  # noqa: F401  # before SGLang
import torch
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as oracle

import mla_suite
from mla_suite import kv_formats

PAGES = 3
# Our name, SGLang's layout, the oracle's writer and reader of its split order.
RECORDS = {
    "v41": ("v41", oracle.quantize_k_cache_v41, oracle.dequantize_k_cache_v41),
    "v41_interleaved": ("v41_new", oracle.quantize_k_cache_v41, oracle.dequantize_k_cache_v41),
    "v41_fp4": ("v41_fp4", oracle.quantize_k_cache_v41_fp4, oracle.dequantize_k_cache_v41_fp4),
    "v41_fp4_interleaved": ("v41_fp4_new", oracle.quantize_k_cache_v41_fp4, oracle.dequantize_k_cache_v41_fp4),
}


def hostile(page, dtype):
    """Rows of tiles of every size: scales at both their ends, subnormal values, ties of e2m1, both zeros and a NaN.

    No infinity: the oracle of 528 bytes keeps zeros beside one, whose scale is NaN here and there.
    """
    generator = torch.Generator().manual_seed(page)
    sizes = torch.randint(-30, 14, (PAGES, page, 32), generator=generator).float().exp2().repeat_interleave(16, dim=-1)
    rows = torch.randn(PAGES, page, 512, generator=generator) * sizes
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(64)
    rows[0, 0], rows[1, 0] = ties, -ties
    rows[2, 0, :256], rows[2, 0, 256:] = 0.0, -0.0
    rows[0, 1, 37] = torch.nan
    rows[0, 2, ::2], rows[0, 2, 1::16] = -1e-30, 8.0  # negative values that are rounded to zero
    return rows.to(dtype)


def bytes_of(cache):
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1)).view(torch.uint8)


def oracles_pages(name, rows):
    """The oracle's pages of `rows`, in the order of `name`."""
    layout, write, _ = RECORDS[name]
    layout, page = KVLayout.parse(layout), rows.shape[1]
    split = write(rows)
    if layout.is_fp4:
        # The oracle gives the code of a NaN whatever sign a division by NaN leaves on this machine.
        values = split.view(PAGES, -1)[:, : page * 256].view(PAGES, page, 32, 8)
        values &= torch.where(rows.unflatten(-1, (32, 16)).isnan().any(dim=-1, keepdim=True), 0x77, 0xFF).byte()
    if not layout.is_interleaved:
        return split
    return oracle.interleave_pages(split, page, layout.data_bytes, layout.scale_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [5, 64])
@pytest.mark.parametrize("name", RECORDS)
def test_written_bytes(name, page, dtype):
    rows = hostile(page, dtype)
    expected = oracles_pages(name, rows)
    assert torch.equal(bytes_of(kv_formats.pack(name, rows)), expected)
    written = kv_formats.empty(name, PAGES, page)
    bytes_of(written).zero_()
    flat = rows.flatten(0, 1)
    mla_suite.append_kv(flat[:, :448], flat[:, 448:], written, torch.arange(len(flat)), kv_format=name)
    assert torch.equal(bytes_of(written), expected)
    assert written.stride(0) == KVLayout.parse(RECORDS[name][0]).page_bytes(page)


@pytest.mark.parametrize("name", RECORDS)
def test_read_values(name):
    """Every byte there is, in values and in scales."""
    layout, page = KVLayout.parse(RECORDS[name][0]), 8
    draw = torch.Generator().manual_seed(0)
    split = torch.randint(0, 256, (PAGES, layout.encoding.page_bytes(page)), dtype=torch.uint8, generator=draw)
    expected = RECORDS[name][2](split, page).float()
    pages = split
    if layout.is_interleaved:
        pages = oracle.interleave_pages(split, page, layout.data_bytes, layout.scale_bytes)
    cache = pages.as_strided((PAGES, page, layout.bytes_per_token), (pages.stride(0), layout.bytes_per_token, 1))
    # The oracle multiplies in bf16, which is where attention's keys are rounded.
    found = kv_formats.unpack(name, cache).bfloat16().float()
    assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
