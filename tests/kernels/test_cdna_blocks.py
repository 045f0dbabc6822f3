"""Each building block of csrc/cdna alone, in the emulator: its lane map, its numbers, its LDS banks."""

from __future__ import annotations

from functools import partial

import own_kernels
import pytest
import torch
from own_kernels import assembly

from mla_suite.models import rope

LANES = torch.arange(64)
COLUMN, GROUP = LANES % 16, LANES // 16

launch = partial(own_kernels.launch, "gfx942")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return assembly("cdna_blocks", "gfx942", tmp_path_factory.mktemp("blocks"))


def run_block(text, kernel, first, second, out, out2=None):
    none = torch.zeros(1)
    second, out2 = none if second is None else second, torch.zeros(1) if out2 is None else out2
    return launch(text, kernel, 64, [(first, "r"), (second, "r"), (out, "rw"), (out2, "rw")])


@pytest.mark.parametrize(("kernel", "dtype"), [("matrix_bf16", torch.bfloat16), ("matrix_fp16", torch.float16)])
def test_matrix_lane_map(text, kernel, dtype):
    a, b, out = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype), torch.zeros(16, 16)
    run_block(text, kernel, a, b, out)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_chunk_contracts_all_its_columns(text):
    a, b, out = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16(), torch.zeros(16, 16)
    run_block(text, "chunk_bf16", a, b, out)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-5)


def test_transpose_pair(text):
    keys = torch.randint(0, 2**15, (64, 4, 2), dtype=torch.int16)  # [lane, key, column]
    out = torch.zeros(64, 2, 4, dtype=torch.int16)
    run_block(text, "transpose", keys, None, out)
    assert torch.equal(out, keys.transpose(1, 2))


def test_cross_lane(text):
    x, out = torch.randn(64), torch.zeros(64, 4)
    run_block(text, "cross_lane", x, None, out)
    groups = x.view(4, 16)
    assert torch.equal(out[:, 0], x.flip(0))
    assert torch.equal(out[:, 1], groups.amax(0).repeat(4))
    torch.testing.assert_close(out[:, 2], groups.sum(0).repeat(4), rtol=1e-6, atol=1e-6)
    assert torch.equal(out[:, 2].view(4, 16), out[:16, 2].expand(4, 16)), "the sums of a column differ in their bits"
    assert bool((out[:, 3] == x[5]).all())


def test_conversions(text):
    x = torch.randn(64, 2) * torch.logspace(-6, 4, 128).view(64, 2)
    x[0] = torch.tensor([1.00390625, 1.01171875])  # halfway between two bf16 values, the lower even and odd
    x[1] = torch.tensor([0.0, 1.0])
    out = torch.zeros(64, 3, dtype=torch.int32)
    run_block(text, "convert", x, None, out)
    halves = out.view(torch.int16).view(64, 3, 2)
    assert torch.equal(halves[:, 0], x.bfloat16().view(torch.int16))
    assert torch.equal(halves[:, 2], x.half().view(torch.int16))
    weights = halves[:, 1].contiguous().view(torch.bfloat16).double()
    assert bool(((weights - x.double()).abs() <= x.double().abs() * 2**-8).all())


def test_latent_tile_turns_rows_into_columns_without_conflicts(text):
    tile = torch.randint(-(2**15), 2**15, (16, 512), dtype=torch.int16)
    out = torch.zeros(4, 4, 64, 8, dtype=torch.int16)
    report = run_block(text, "latent_tile", tile, None, out)
    for block in range(4):
        for j in range(4):
            columns = block * 128 + 8 * COLUMN[:, None] + torch.arange(8)
            assert torch.equal(out[block, j], tile[(4 * GROUP + j)[:, None], columns])
    assert report.lds_clocks() == 2 * tile.nbytes / 128, "written and read once at 128 bytes a clock"


def test_key_groups_become_one(text):
    """Waves 0 and 2, and 1 and 3, hold the same rows: group 0 ends with tile 0 of both, group 1 with tile 1."""
    outputs, stats = torch.randn(4, 2, 32, 64, 4), torch.rand(4, 2, 2, 16).repeat(1, 1, 1, 4) * 40 + 1
    stats[1, 0] = torch.tensor([-1e30, 0.0])[:, None]  # a group that saw no key
    outputs[1, 0] = 0.0
    merged, found = torch.zeros_like(outputs), torch.zeros_like(stats)
    arrays = [(outputs, "r"), (stats, "r"), (merged, "rw"), (found, "rw")]
    report = launch(text, "key_groups", 256, arrays)
    largest = torch.maximum(stats[:2, :, 0], stats[2:, :, 0])
    weights = torch.exp2(stats[:, :, 0].double() - largest.repeat(2, 1, 1).double())
    sums = (weights * stats[:, :, 1].double()).view(2, 2, 2, 64).sum(0)
    expected = (weights[:, :, None, :, None] * outputs.double()).view(2, 2, 2, 32, 64, 4).sum(0)
    for group in range(2):
        at = slice(2 * group, 2 * group + 2)
        assert torch.equal(found[at, :, 0], largest)
        torch.testing.assert_close(found[at, :, 1].double(), sums, rtol=1e-6, atol=0)
        torch.testing.assert_close(merged[at, group].double(), expected[:, group], rtol=1e-5, atol=1e-6)
    written = [pc for pc, name in enumerate(report.names) if name == "ds_write_b128"]
    assert report.lds_clocks(written) == sum(int(report.lds_bytes[pc]) for pc in written) / 128, "a bank conflict"


def test_fp8_values_become_columns(text):
    codes = torch.randint(0, 256, (64, 8, 8), dtype=torch.uint8)  # [lane, key, column]
    fp8, bf16 = torch.zeros(64, 8, 8, dtype=torch.uint8), torch.zeros(64, 8, 4, dtype=torch.bfloat16)
    run_block(text, "columns_fp8", codes, None, fp8, bf16)
    assert torch.equal(fp8, codes.transpose(1, 2))
    expected = codes[:, :4].view(torch.float8_e4m3fnuz).bfloat16().transpose(1, 2)
    assert torch.equal(bf16.isnan(), expected.isnan())
    assert torch.equal(bf16.nan_to_num(), expected.nan_to_num())


def test_softmax_keeps_its_reference_until_it_lags(text):
    scores = torch.randn(2, 64, 4)
    scores[1, :, :] += 10.0  # 5 after scaling: within the lag
    scores[1, COLUMN == 3] += 100.0  # row 3 asks for a new reference
    out, stats = torch.zeros(2, 64, 2, dtype=torch.int32), torch.zeros(3, 64)
    run_block(text, "softmax", scores, None, out, stats)
    # [tile, key, row]
    t = scores.double().view(2, 4, 16, 4).permute(0, 1, 3, 2).reshape(2, 16, 16) * 0.5
    t[1] = t[1].masked_fill(torch.arange(16)[:, None] >= 16 - torch.arange(16), -torch.inf)
    first, second = stats[0].view(4, 16)[0].double(), stats[1].view(4, 16)[0].double()
    torch.testing.assert_close(first, t[0].amax(0), rtol=1e-6, atol=1e-6)
    assert bool((second >= first).all())
    assert float(second[3]) > 40
    weights = out.view(torch.bfloat16).view(2, 4, 16, 4).permute(0, 1, 3, 2).reshape(2, 16, 16).double()
    expected = torch.stack((torch.exp2(t[0] - first), torch.exp2(t[1] - second)))
    assert bool(((weights - expected).abs() <= expected * (2**-8 + 1e-5)).all())
    sums = torch.exp2(t.view(32, 16) - second).sum(0)
    torch.testing.assert_close(stats[2].view(4, 16)[0].double(), sums, rtol=1e-5, atol=1e-5)


def angles(positions):
    phase = positions.double()[:, None] / 10000.0 ** (torch.arange(32) / 32)
    return torch.cat((phase.cos(), phase.sin()), dim=1).float()


def test_rope_has_the_bits_of_rotated_keys(text):
    keys, cos_sin = torch.randn(16, 64).bfloat16(), angles(torch.arange(16) * 1000)
    first = keys[COLUMN[:, None], 8 * GROUP[:, None] + torch.arange(8)]
    second = keys[COLUMN[:, None], 32 + 8 * GROUP[:, None] + torch.arange(8)]
    out = torch.zeros(64, 2, 8, dtype=torch.bfloat16)
    run_block(text, "rope", torch.stack((first, second), dim=1).contiguous(), cos_sin, out)
    expected = rope.rotate(keys, cos_sin, interleaved=False)
    for half in range(2):
        assert torch.equal(out[:, half], expected[COLUMN[:, None], half * 32 + 8 * GROUP[:, None] + torch.arange(8)])


@pytest.mark.parametrize("kernel", ["stages_plain", "stages_rotated", "stages_fp8"])
@pytest.mark.parametrize(("page", "first_key", "end_key"), [(1, 0, 16), (64, 64, 96), (61, 17, 17 + 300), (5, 3, 36)])
def test_stages_bring_every_row_to_both_products(text, kernel, page, first_key, end_key):
    rotate, keys_of_stage = kernel == "stages_rotated", 32 if kernel == "stages_fp8" else 16
    stored = torch.float8_e4m3fnuz if kernel == "stages_fp8" else torch.bfloat16
    pages = -(-end_key // page)
    table = torch.randperm(pages + 3)[:pages].to(torch.int32)
    cache = torch.full((pages + 3, page, 576), torch.nan, dtype=torch.bfloat16)
    rows = torch.randn(end_key, 576).to(stored).bfloat16()
    keys = torch.arange(end_key)
    cache[table[keys // page].long(), keys % page] = rows
    cos_sin = angles(keys)
    stages = -(-(end_key - first_key) // keys_of_stage)
    tiles = stages * keys_of_stage // 16
    values = 16 // stored.itemsize  # of a piece that a lane holds
    pieces = torch.zeros(tiles, 18, 64, 16, dtype=torch.uint8)
    columns = torch.zeros(tiles, 4, 4, 64, 8 * stored.itemsize, dtype=torch.uint8)
    cache = cache.to(stored).view(torch.uint8)
    arrays = [(cache, "r"), (table, "r"), (cos_sin, "r"), (pieces, "rw"), (columns, "rw")]
    report = launch(text, kernel, 256, arrays, page, first_key, end_key)
    pieces, columns = pieces.view(stored).bfloat16(), columns.view(stored).bfloat16()
    for tile in range(tiles):
        key = (first_key + 16 * tile + torch.arange(16)).clamp(max=end_key - 1)
        expected = rows[key]
        wide = expected
        if rotate:
            wide = torch.cat((expected[:, :512], rope.rotate(expected[:, 512:], cos_sin[key], interleaved=False)), 1)
        for m in range(576 // (4 * values)):
            part = wide[COLUMN[:, None], values * (4 * m + GROUP[:, None]) + torch.arange(values)]
            assert torch.equal(pieces[tile, m], part)
        for block in range(4):
            for j in range(4):
                place = block * 128 + 8 * COLUMN[:, None] + torch.arange(8)
                assert torch.equal(columns[tile, block, j], expected[(4 * GROUP + j)[:, None], place])
    cost = dict.fromkeys(("ds_read_b128", "ds_read_b64", "global_load_lds_dword"), 0)
    moved = dict(cost)
    for pc, name in enumerate(report.names):
        if name in cost:
            cost[name] += int(report.lds_clocks_128[pc])
            moved[name] += int(report.lds_bytes[pc])
    assert cost == {name: nbytes / 128 for name, nbytes in moved.items()}, "a bank conflict"
    assert report.loaded["array 0"] == tiles * 16 * 576 * stored.itemsize, "every row is read once"
