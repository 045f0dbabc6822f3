"""Sliding windows and trees of drafts in the machine code for AMD's archs, executed in the emulator.

Random ones against fp64 are in test_random_problems.py.
"""

from __future__ import annotations

import shutil

import decode_grid as grid
import planted
import pytest
import torch
from built import assembly, emulated, require_built
from decode_grid import CPU, assert_within_bound

import mla_suite
from mla_suite import archs
from mla_suite.archs import CSRC
from mla_suite.build.instances import instances
from mla_suite.build.manifest import KernelEntry, installed
from mla_suite.emulator.driver import EmulatorDriver
from mla_suite.launch import LaunchError, launcher
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import Exact, exact_decode

arch = emulated()


def check(arch, sample):
    args, kwargs = sample.make(CPU)
    assert_within_bound(
        *grid.decode(arch, grid.made_hostile(args, kwargs, arch), kwargs), exact_decode(*args, **kwargs)
    )


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("page", "options"), [(1, {"num_splits": 3}), (64, {"planned": True, "varlen": True})], ids=str
)
def test_a_window_that_begins_anywhere_in_a_tile(arch, heads, page, options):
    """Six lengths, so that windows of 100 keys begin at other places in a tile, in a page and behind their origin."""
    q_len = 3 if heads < 128 else 1
    check(
        arch,
        decode_sample((100, 103, 164, 181, 228, 317), heads=heads, q_len=q_len, page=page, window_left=99, **options),
    )


def test_a_window_of_un_rotated_keys(arch):
    check(arch, decode_sample((300, 129), heads=32, q_len=2, rotate=True, window_left=70))


@pytest.mark.parametrize("causal", [True, False])
def test_splits_that_lie_before_the_window(arch, causal):
    """Of splits of 16 keys from the origin on, the first three are empty."""
    check(arch, decode_sample((300,), heads=16, split_size=16, window_left=185, causal=causal))


def test_a_plan_made_with_another_window(arch):
    args, kwargs = decode_sample((700, 0, 64, 130), q_len=2, window_left=63).make(CPU)
    for made_with in (-1, 10):
        plan = mla_suite.plan(args[2], num_heads=16, max_seqlen_q=2, num_sm_parts=7, window_left=made_with)
        found = grid.decode(arch, (*args[:11], plan, *args[12:]), kwargs)
        assert_within_bound(*found, exact_decode(*args, **kwargs))


def test_batch_invariant_bits_in_a_window(arch):
    args, kwargs = decode_sample((333, 5, 200), heads=48, split_size=64, window_left=150).make(CPU)
    together = grid.decode(arch, args, kwargs)
    alone = grid.decode(arch, grid.sequences(args, slice(1)), kwargs)
    assert all(torch.equal(one[0], among[0]) for one, among in zip(alone, together, strict=True))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_window_reads_what_a_sequence_of_its_keys_reads(arch, heads):
    """512 of 4096 keys: the same bytes of the cache and the same number of instructions as a sequence of 512 keys."""
    windowed, short = (
        grid.counted(arch, *decode_sample((length,), heads=heads, num_splits=1, **mask).make(CPU))
        for length, mask in ((4096, {"window_left": 511}), (512, {}))
    )
    assert windowed.loaded["kv_cache"] == short.loaded["kv_cache"]
    assert windowed.instructions() == pytest.approx(short.instructions(), rel=0.01)


@pytest.mark.parametrize("how", [{"num_splits": 1}, {"num_splits": 3}, {"planned": True}, {"split_size": 32}], ids=str)
@pytest.mark.parametrize(
    ("window_left", "spoiled", "whole"), [(-1, (38, 70), (0, 8)), (9, (38, 70), (0, 8)), (9, (21, 53), (32, 40))]
)
def test_a_row_tile_reads_no_key_that_none_of_its_rows_sees(arch, how, window_left, spoiled, whole):
    """40 query tokens of 16 heads behind 30 keys are five row tiles. A NaN that is read is in all rows of a tile."""
    args, kwargs = decode_sample((70,), q_len=40, page=1, window_left=window_left, **how).make(CPU)
    exact = exact_decode(*args, **kwargs)
    args[1][args[3][0, slice(*spoiled)].long()] = torch.nan
    out, lse = grid.decode(arch, args, kwargs)
    seen = slice(None), slice(*whole)
    assert_within_bound(out[seen], lse[seen], Exact(*(part[seen] for part in exact)))


@pytest.mark.parametrize("tokens", [104, 200])
def test_row_tiles_of_an_extend_read_less_the_earlier_they_are(arch, tokens):
    """Row tiles of eight tokens behind no key read at most one stage of 32 keys more than they see."""
    report = grid.counted(arch, *decode_sample((tokens,), q_len=tokens, num_splits=1).make(CPU))
    seen = sum(range(8, tokens + 1, 8))
    assert seen <= report.loaded["kv_cache"] / (2 * 576) < seen + 32 * tokens / 8


EXTENDS = [
    ((100, 40, 33), {"num_splits": 3, "page": 16, "sink": True}),
    ((230, 0, 300), {"planned": True, "varlen": True}),
    ((100, 97), {"split_size": 64, "window_left": 20, "varlen": True}),
    ((147, 18, 60), {"ranks": (4, 1, 16)}),
    ((211, 94), {"ranks": (3, 0, 1), "num_splits": 2, "varlen": True}),
    ((100, 70), {"causal": False, "window_left": 30}),
    ((100, 55), {"tree": True, "num_splits": 2}),
    ((120, 50), {"rotate": True, "num_splits": 2}),
]


@pytest.mark.parametrize(("lens", "options"), EXTENDS, ids=str)
def test_an_extend(arch, lens, options):
    """50 query tokens in several row tiles, of sequences that may be shorter than they."""
    heads = 48 if options.get("ranks") else 16
    check(arch, decode_sample(lens, heads=heads, q_len=50, **options))


@pytest.mark.parametrize("stored", [{}, {"kv_format": "fp8"}], ids=str)
@pytest.mark.parametrize(("heads", "q_len"), [(16, 5), (8, 64)])
def test_the_mask_of_a_chain_gives_the_causal_bits(arch, heads, q_len, stored):
    stored = {"kv_format": grid.FP8_FORMATS[arch]} if stored else {}
    args, kwargs = decode_sample((100, 33, 64), heads=heads, q_len=q_len, num_splits=2, **stored).make(CPU)
    words = [-1 if i == 63 else (2 << i) - 1 for i in range(q_len)]
    tree = torch.tensor([[*words, 0]] * 3)[:, :q_len]  # not contiguous
    for mine, right in zip(grid.decode(arch, (*args[:13], tree), kwargs), grid.decode(arch, args, kwargs), strict=True):
        assert torch.equal(mine, right)


def test_a_tree_beside_a_sequence_that_is_shorter_than_it(arch):
    check(arch, decode_sample((130, 3, 0, 7), heads=16, q_len=9, tree=True, sink=True, varlen=True))


FAULTS = {
    "a row's window forgotten": (
        "row_mask.hpp",
        "place + 16 * T + r < count",
        "static_cast<int>(place + 16 * T + r - count) < 0",
    ),
    "whole tiles from the first row's window on": ("row_mask.hpp", "(p, rows.q_len - 1)", "(p, 0)"),
    "a tree behind whole tiles": ("row_mask.hpp", "if (p.tree_mask) end = ", "if (false) end = "),
    "the next draft's bit": ("row_mask.hpp", "16 * T - FIRST_DRAFT)", "16 * T - FIRST_DRAFT + 1)"),
    "keys between origin and window read": ("kernel.hpp", "origin + tile.first_key < first_read ? first_read : ", ""),
    "an end that is counted from key 0": ("kernel.hpp", "tile.end_key += origin;", ""),
    "an extend's keys as a tile's first row sees": ("kernel.hpp", "(first_row), Problem::rows", "(first_row), 1"),
}
ARCH, INSTANCE = "gfx942", "decode_dtype-bf16_rows-48_width-576_rotate-0"  # that the faults are planted in


@planted.each_of(
    FAULTS,
    "a row's window forgotten",
    "the next draft's bit",
    place=lambda file, right, wrong: (f"cdna/decode/{file}", right),
)
def test_planted_faults(name, tmp_path, monkeypatch):
    """With one of these in the source, a window, a tree or an extend gives a wrong result or a finding."""
    require_built(ARCH)
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc, ignore=shutil.ignore_patterns("emulator", "sm_90"))
    file, right, wrong = FAULTS[name]
    planted.plant(csrc / "cdna" / "decode" / file, right, wrong)
    item = next(item for item in instances(ARCH) if item.id == INSTANCE)
    constants = item.constants | {"MLA_SUITE_KERNEL": item.symbol}
    text = assembly(ARCH, csrc / item.source, tmp_path / "broken.s", constants, csrc)
    driver = EmulatorDriver(archs.get(ARCH))
    with monkeypatch.context() as patched:
        patched.setattr(KernelEntry, "read_text", lambda self: text)
        broken = driver, driver.load(installed().find(ARCH, INSTANCE))
    with mla_suite.emulate(ARCH):
        masked_calls_are_right()
        monkeypatch.setitem(launcher._prepared, (ARCH, INSTANCE), broken)
        with pytest.raises((OutOfBound, LaunchError)):
            masked_calls_are_right()


class OutOfBound(Exception):
    """A result that is not within its bound."""


def masked_calls_are_right():
    for heads, q_len, mask in ((9, 5, {"window_left": 90}), (9, 5, {"tree": True}), (1, 45, {})):
        args, kwargs = decode_sample((207, 66), heads=heads, q_len=q_len, num_splits=1, **mask).make(CPU)
        choice = grid.chosen(ARCH, args, kwargs)
        assert choice.supported.config.instance == INSTANCE
        out, lse = torch.empty(2, q_len, heads, 512, dtype=torch.bfloat16), torch.empty(2, q_len, heads)
        hostile = grid.made_hostile(args, kwargs, ARCH)
        choice.backend.run(choice.supported.config, (out, lse), DECODE.Args(*hostile, **kwargs))
        try:
            assert_within_bound(out, lse, exact_decode(*args, **kwargs))
        except AssertionError as error:
            raise OutOfBound(str(error)) from error
