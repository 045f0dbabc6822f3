"""Each building block that csrc/cdna has for CDNA4, in the emulator: its lane map, its numbers, its LDS banks."""

from __future__ import annotations

from functools import partial

import own_kernels
import pytest
import torch
from own_kernels import assembly

LANES = torch.arange(64)
COLUMN, GROUP = LANES % 16, LANES // 16
E4M3 = torch.float8_e4m3fn

launch = partial(own_kernels.launch, "gfx950")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return assembly("cdna4_blocks", "gfx950", tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize(
    ("kernel", "dtype", "k"),
    [
        ("matrix_bf16", torch.bfloat16, 32),
        ("matrix_fp16", torch.float16, 32),
        ("matrix_fp8", E4M3, 32),
        ("matrix_fp8x128", E4M3, 128),
    ],
)
def test_matrix_lane_map(text, kernel, dtype, k):
    left, right, out = torch.randn(16, k).to(dtype), torch.randn(16, k).to(dtype), torch.zeros(16, 16)
    stored = [tensor.view(torch.uint8) for tensor in (left, right)]
    launch(text, kernel, 64, [(stored[0], "r"), (stored[1], "r"), (out, "rw")])
    torch.testing.assert_close(out.double(), left.double() @ right.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "dtype", "keys"),
    [("ring_bf16", torch.bfloat16, 32), ("ring_fp8_64", E4M3, 64), ("ring_fp8_128", E4M3, 128)],
)
@pytest.mark.parametrize(("page", "first_key", "end_key"), [(1, 0, 16), (64, 64, 200), (61, 17, 17 + 600), (5, 3, 36)])
def test_the_ring_brings_every_row_to_both_products(text, kernel, dtype, keys, page, first_key, end_key):
    pages = -(-end_key // page)
    table = torch.randperm(pages + 3)[:pages].to(torch.int32)
    cache = torch.full((pages + 3, page, 576), torch.nan).to(dtype)
    rows = torch.randn(end_key, 576).to(dtype)
    key = torch.arange(end_key)
    cache[table[key // page].long(), key % page] = rows
    size = dtype.itemsize
    tiles, row_pieces, reads = -(-(end_key - first_key) // keys), 576 * size // 64, keys * size // 32
    pieces = torch.zeros(tiles, keys // 16, row_pieces, 64, 16, dtype=torch.uint8)
    columns = torch.zeros(tiles, 32, reads, 64, 8, dtype=torch.uint8)
    arrays = [(cache.view(torch.uint8), "r"), (table, "r"), (pieces, "rw"), (columns, "rw")]
    report = launch(text, kernel, 256, arrays, page, first_key, end_key)
    for tile in range(tiles):
        expected = rows[(first_key + keys * tile + torch.arange(keys)).clamp(max=end_key - 1)].view(torch.uint8)
        for T in range(keys // 16):
            for m in range(row_pieces):
                place = 64 * m + 16 * GROUP[:, None] + torch.arange(16)
                assert torch.equal(pieces[tile, T, m], expected[16 * T + COLUMN[:, None], place])
        expected = expected.view(keys, 576, size)
        for t in range(32):
            for n in range(reads):
                four = 4 * GROUP[:, None] + torch.arange(4)
                held = four + 16 * n if size == 2 else torch.cat((four, four + 16), dim=1) + 32 * n
                assert torch.equal(columns[tile, t, n], expected[held, 16 * t + COLUMN[:, None]].flatten(1))
    for kind in ("ds_read_b128", "ds_read_b64_tr", "global_load_lds_dwordx4"):
        places = [pc for pc, name in enumerate(report.names) if name.startswith(kind)]
        assert places
        clocks, moved = (sum(int(counts[pc]) for pc in places) for counts in (report.lds_clocks_128, report.lds_bytes))
        assert clocks == moved / 128, f"{kind}: a bank conflict"
    assert report.loaded["array 0"] == tiles * keys * 576 * size, "every row is read once"
