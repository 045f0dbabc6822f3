"""decode's machine code for AMD's archs, executed in the emulator with every check on, against fp64.

On a machine with such a GPU the calls run there instead. What an instance is and costs is in test_decode_instances.py.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import decode_grid as grid
import pytest
import torch
from built import require_built
from decode_grid import CPU, FNUZ, FNUZ_QUERY, FP16, HEADS, LENS, OCP, OCP_QUERY, PAGES, Q_LENS
from hostile_inputs import in_turn

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import combine as combine_configs
from mla_suite.core import tuning
from mla_suite.launch import current_arch, scratch
from mla_suite.models import rope
from mla_suite.ops.combine import Problem as CombineProblem
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode, poison

NARROW = (
    {"latent": 256, "rope": 64, "num_splits": 1},
    {"latent": 256, "rope": 32, "planned": True, "varlen": True, "sink": True},
    {"latent": 128, "rope": 32, "num_splits": 3},
)
FP8_MODES = [mode for mode in grid.MODES if mode.get("causal", True)]


class Target(NamedTuple):
    """Kernels of an arch, tested alike.

    modes     cases of the pairwise cover: how a call is split and what is stored
    caches    what is stored in the whole product, and in turn where one is enough
    queries   those of the tests of hard scores and bits
    descales  what is stored, and its descales of queries and keys
    """

    arch: str
    modes: tuple[dict[str, Any], ...]
    caches: tuple[dict[str, Any], ...]
    queries: dict[str, Any]
    descales: tuple[tuple[dict[str, Any], tuple[float, ...]], ...]


TARGETS = {
    "gfx942": Target(
        "gfx942",
        (
            *grid.MODES,
            {"rotate": True, "num_splits": 1},
            {"rope": 0, "num_splits": 1},
            {**FP16, "num_splits": 1},
            {**FP16, "rope": 0, "planned": True},
            *NARROW,
            {**FNUZ, "num_splits": 1},
            {**FNUZ_QUERY, "planned": True, "sink": True},
        ),
        ({}, FP16, FNUZ),
        {},
        ((FNUZ, (0.75, 1.5)), (FNUZ_QUERY, (0.75, 1.5)), ({}, (0.3,)), (FP16, (0.3,))),
    ),
    "gfx950": Target(
        "gfx950",
        (
            *grid.MODES,
            {"rotate": True, "num_splits": 1},
            {"rotate": True, "planned": True},
            {"rope": 0, "num_splits": 1},
            {**FP16, "num_splits": 1},
            {**FP16, "rope": 0, "planned": True},
            *NARROW,
        ),
        ({}, FP16, {"rotate": True}),
        {},
        (({}, (0.3,)), (FP16, (0.3,))),
    ),
    "gfx950 fp8": Target(
        "gfx950",
        # So turned, each number of heads meets each mode in either half, with one or the other.
        tuple({**OCP_QUERY, **mode} for mode in FP8_MODES)
        + tuple({**OCP, **mode} for mode in (*FP8_MODES[1:], FP8_MODES[0])),
        (OCP_QUERY, OCP),
        OCP_QUERY,
        ((OCP_QUERY, (0.75, 0.3)), (OCP, (0.75, 0.3))),
    ),
}


def machine(arch):
    """The device whose kernels of the arch are called."""
    if torch.cuda.is_available():
        here = current_arch(torch.empty(0, device="cuda"))
        if here is not None and here.name == arch:
            return torch.device("cuda")
    return CPU


@pytest.fixture(params=TARGETS)
def target(request):
    """Every target in turn, or the one that a test names."""
    found = TARGETS[request.param]
    require_built(found.arch)
    with mla_suite.emulate(found.arch):
        yield found


on_gfx942 = pytest.mark.parametrize("target", ["gfx942"], indirect=True)
on_bf16 = pytest.mark.parametrize("target", ["gfx942", "gfx950"], indirect=True)


def decode(target, args, kwargs):
    return grid.decode(target.arch, args, kwargs, machine(target.arch))


def assert_right(target, args, kwargs):
    grid.assert_right(target.arch, args, kwargs, machine(target.arch))


def check(target, sample):
    grid.check(target.arch, sample, machine(target.arch))


def same(results, others):
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize(("half", "target"), in_turn([0, 1], TARGETS), indirect=["target"])
@pytest.mark.parametrize("heads", HEADS)
def test_within_the_rounding_bound(target, heads, half):
    """A default run takes one half of the cover on gfx942 and the other on gfx950: there, too, any two meet on one."""
    for h, q_len, page, start, mode in grid.cover(target.modes, [half]):
        if h == heads:
            lens = grid.lengths(start, h, q_len)
            check(target, decode_sample(lens, heads=h, q_len=q_len, page=page, seed=start, **mode))


@pytest.mark.parametrize("name", TARGETS)
def test_the_cover_is_pairwise(name):
    """With heads and lengths, whose pairs meet below in one batch, any two of the five."""
    grid.assert_pairwise(TARGETS[name].modes)


@pytest.mark.parametrize("heads", HEADS)
def test_all_lengths_in_one_batch(target, heads):
    """Every length beside every other, whatever the number of heads."""
    at = HEADS.index(heads)
    stored = target.caches[at % len(target.caches)]
    check(
        target, decode_sample(LENS, heads=heads, page=PAGES[at % len(PAGES)], sink=at % 2 == 0, num_splits=1, **stored)
    )


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_whole_product(target, heads, q_len, page):
    """Every length in one batch, poisoned, split and unsplit, for each cache type."""
    for options in ({"num_splits": 1}, {"planned": True, "sink": True}):
        for stored in target.caches:
            check(target, decode_sample(LENS, heads=heads, q_len=q_len, page=page, **options, **stored))


@on_bf16
@pytest.mark.parametrize("heads", [144, 300])
def test_more_heads_than_a_tile_has_rows(target, heads):
    check(target, decode_sample((33, 70), heads=heads, sink=True, num_splits=1))


@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("kind", ["large", "equal", "dominating", "rising", "falling"])
def test_hard_scores(target, heads, kind):
    """Logits to +-200, rows that are all equal, one key above all others, and references that rise or never do."""
    q_len = 1 if heads == 128 else 2
    args, kwargs = decode_sample((300,), heads=heads, q_len=q_len, num_splits=1, **target.queries).make(CPU)
    grid.hard_scores(kind, args)
    assert_right(target, args, kwargs)


FEW_SPLITS = (1, 2, 3, 7, 16, 33, 64)


@on_bf16
@pytest.mark.parametrize(
    "splits", [pytest.param(n, marks=[] if n in FEW_SPLITS else pytest.mark.full) for n in range(1, 65)]
)
def test_splits_agree(target, splits):
    heads = (16, 32, 12)[splits % 3]
    check(target, decode_sample((1000, 65, 0), heads=heads, sink=splits % 2 == 0, num_splits=splits))


@pytest.mark.parametrize("heads", [16, 40, 128])
def test_descales(target, heads):
    for stored, descales in target.descales:
        args, kwargs = decode_sample((100, 7), heads=heads, num_splits=1, **stored).make(CPU)
        assert_right(target, [*args[:7], *map(torch.tensor, descales), *args[7 + len(descales) :]], kwargs)


@on_bf16
@pytest.mark.parametrize("heads", [16, 40, 128])
def test_an_unrotated_cache_has_the_bits_of_a_rotated_one(target, heads):
    args, kwargs = decode_sample((300,), heads=heads, rotate=True, num_splits=2).make(CPU)
    unrotated = decode(target, args, kwargs)
    pages = args[3][0].long()
    keys = args[1][pages].flatten(0, 1)
    keys[:300, 512:] = rope.rotate(keys[:300, 512:], args[10], interleaved=False)
    args[1][pages] = keys.unflatten(0, (-1, 64))
    assert same(decode(target, [*args[:10], None, *args[11:]], kwargs), unrotated)


@on_bf16
@pytest.mark.parametrize("scale", [0.0, -(192**-0.5)])
def test_scales_that_are_not_positive(target, scale):
    args, kwargs = decode_sample((100, 7), heads=16, num_splits=1).make(CPU)
    assert_right(target, args, kwargs | {"softmax_scale": scale})


@on_bf16
@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_infinite_sinks(target, sink):
    args, kwargs = decode_sample((100, 0), heads=16, sink=True, num_splits=1).make(CPU)
    args[9].fill_(sink)
    assert_right(target, args, kwargs)


@on_gfx942
def test_strided_queries_and_outputs(target):
    args, kwargs = decode_sample((100, 7), heads=16, num_splits=1).make(CPU)
    wide = torch.zeros(2, 1, 16, 580, dtype=torch.bfloat16)
    wide[..., 1:577] = args[0]
    padded = torch.zeros(2, 3, 32, 520, dtype=torch.bfloat16)[:, :1, ::2, :512]
    lse = torch.zeros(2, 3, 32)[:, :1, :16]
    torch.ops.mla_suite.decode.out(wide[..., 1:577], *args[1:], **kwargs, out=padded, lse=lse)
    grid.assert_within_bound(padded, lse, exact_decode(*args, **kwargs))


@pytest.mark.parametrize("heads", [16, 64])
def test_blocks_and_rows_of_a_table_that_lie_apart(target, heads):
    (q, cache, lens, table, *rest), kwargs = decode_sample((100, 7, 70), heads=heads, num_splits=1).make(CPU)
    blocks = poison(torch.empty(len(cache), 80, 576, dtype=torch.bfloat16))[:, :64].copy_(cache)
    rows = torch.full((3, 9), 2**31 - 1, dtype=torch.int32)[:, 4:6].copy_(table)
    assert_right(target, (q, blocks, lens, rows, *rest), kwargs)


PAGES_APART = (
    140_000  # of 64 x 576 values: 10.3 GB of address space, or 5.2 GB of fp8, of which a few pages are touched
)


@pytest.mark.parametrize("heads", [16, 48])
def test_pages_that_lie_far_apart(target, heads):
    """Further than 32 bits of bytes or elements reach."""
    for stored in target.caches:
        args, kwargs = decode_sample((150, 70), heads=heads, num_splits=1, **stored).make(CPU)
        exact, near, table = exact_decode(*args, **kwargs), args[1], args[3].clone()
        far = torch.empty(PAGES_APART, *near.shape[1:], dtype=near.dtype)
        places = torch.linspace(0, PAGES_APART - 1, near.shape[0]).long().flip(0)
        far[places] = near
        used = (table >= 0) & (table < near.shape[0])
        table[used] = places[table[used].long()].int()
        grid.assert_within_bound(*decode(target, [args[0], far, args[2], table, *args[4:]], kwargs), exact)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_same_bits_again_and_in_any_order(target, heads):
    args, kwargs = decode_sample((300, 65, 130), heads=heads, planned=True, **target.queries).make(CPU)
    first = decode(target, args, kwargs)
    for order in ("forward", "reverse", "shuffle:3")[target.arch == "gfx950" :]:
        with emulator.configured(order=order):
            assert same(first, decode(target, args, kwargs))


@pytest.mark.parametrize(("heads", "target"), in_turn([40, 64, 128], TARGETS), indirect=["target"])
def test_columns_of_a_row_are_divided_by_the_same_bits(target, heads):
    """Four lanes share a row and add up its sum. Where all columns of a key are equal, a partial result's are, too.

    A result in 16 bits would hide lanes that add in different orders; partial results have 32.
    """
    args, kwargs = decode_sample((300,), heads=heads, num_splits=2, **target.queries).make(CPU)
    cache = args[1].view(torch.uint8).unflatten(-1, (args[1].shape[-1], -1))
    cache[..., :512, :] = cache[..., :1, :]
    rows = scratch.take(machine(target.arch), 1 << 20)[: 2 * heads * 512].view(-1, 512)
    assert_right(target, args, kwargs)
    assert rows.std(dim=0).min() > 0.1
    assert bool((rows == rows[:, :1]).all())


# Bits of a sequence, whatever is beside it


@pytest.mark.parametrize(
    ("target", "case"),
    in_turn(["gfx942", "gfx950"], [(16, {}), (48, {}), (48, FNUZ), (16, FNUZ)]),
    indirect=["target"],
    ids=str,
)
def test_batch_invariant_bits(target, case):
    """A sequence's bits in batches of 1, 5 and 64, at another place in each, with other lengths beside it."""
    heads, stored = case
    stored = OCP if stored and target.arch == "gfx950" else stored
    args, kwargs = decode_sample((200, *[5, 17, 33] * 21), heads=heads, split_size=64, **stored).make(CPU)
    kwargs["max_seqlen_kv"] = 256
    alone = decode(target, grid.sequences(args, slice(1)), kwargs)
    for batch, place in ((5, 3), (64, 40)):
        order = [*range(1, place + 1), 0, *range(place + 1, batch)]
        found = decode(target, grid.sequences(args, order), kwargs)
        assert all(torch.equal(a[0], b[place]) for a, b in zip(alone, found, strict=True))


@on_gfx942
def test_batch_invariant_bits_with_a_plan(target):
    """A plan has the work tiles that lengths need, in any number of SM parts; bits are those of a call without one."""
    args, kwargs = decode_sample((200, 5, 64, 130, 33), heads=16, split_size=64).make(CPU)
    wanted = decode(target, args, kwargs)
    for order, parts in (([0], 7), ([3, 0], 2), ([4, 1, 0, 2, 3], 3)):
        given = grid.sequences(args, order)
        given[11] = mla_suite.plan(given[2], num_heads=16, num_sm_parts=parts, max_seqlen_kv=4096, split_size=64)
        found = decode(target, given, kwargs)
        assert all(torch.equal(w[order], f) for w, f in zip(wanted, found, strict=True))


@on_gfx942
@pytest.mark.parametrize("heads", [16, 48])
def test_batch_invariant_bits_of_one_split(target, heads):
    """A sequence that fits one split: alone its result needs no combine, beside a longer one it passes through it."""
    args, kwargs = decode_sample((50, 200), heads=heads, split_size=64).make(CPU)
    together = decode(target, args, kwargs)
    alone = decode(target, grid.sequences(args, slice(1)), kwargs | {"max_seqlen_kv": 64})
    assert all(torch.equal(a[0], t[0]) for a, t in zip(alone, together, strict=True))


@on_gfx942
def test_batch_invariant_bits_of_packed_queries(target):
    """For one max_seqlen_q, whatever number of query tokens a sequence and its neighbours have."""
    args, kwargs = decode_sample((130, 5, 200), heads=16, q_len=3, varlen=True, split_size=64).make(CPU)
    q, cache, lens, table, _, _, bounds, *rest = args
    kwargs["max_seqlen_kv"] = 256
    together = decode(target, args, kwargs)
    for b, (first, end) in enumerate(itertools.pairwise(bounds.tolist())):
        own = torch.tensor([0, end - first], dtype=torch.int32)
        sequence = slice(b, b + 1)
        alone = decode(target, (q[first:end], cache, lens[sequence], table[sequence], None, None, own, *rest), kwargs)
        assert all(torch.equal(a, t[first:end]) for a, t in zip(alone, together, strict=True))


@on_gfx942
@pytest.mark.parametrize("heads", [16, 48])
def test_batch_invariant_across_a_boundary_of_the_table(target, heads, tmp_path, monkeypatch):
    """Batches of 1, 5 and 64 for which a tuned table names other merges; a batch-invariant call does not ask it."""
    points = {1: (1, 4, 16, 4), 5: (1, 4, 8, 4), 64: (4, 4, 4, 1)}
    form, names = combine_configs.FORMAT, ("rows_per_group", "vec", "waves", "slices")
    lines = [",".join(form.header)]
    for batch, point in points.items():
        row = dict(head_dim_v=512, out_dtype="bf16", device_units=304, rows=heads, batch=batch, splits=4)
        row |= dict(zip(names, point, strict=True)) | dict(num_splits=4, fixed_splits=0)
        lines.append(form.line({**row, "kind": "counted", "date": "2026-01-01", "commit": "0123456"}))
    table = tmp_path / "combine" / "gfx942.csv"
    table.parent.mkdir()
    table.write_text("\n".join(lines) + "\n")
    with monkeypatch.context() as patched:
        patched.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path))
        tuning.clear_cache()
        merged = [CombineProblem(batch, heads, 512, 4, torch.bfloat16, False, 4 * batch) for batch in points]
        chosen = {combine_configs.choose(problem, archs.get("gfx942")) for problem in merged}
        assert len(chosen) == len(points), "the table has a boundary between any two of the batches"
        assert all("tuned" in reason or "row" in reason for _, reason in chosen), chosen
        test_batch_invariant_bits(target, (heads, {}))
    tuning.clear_cache()


@pytest.mark.parametrize("target", ["gfx950"], indirect=True)
def test_batch_invariant_bits_whatever_the_width_of_the_table_is(target):
    """A wider table, as beside a longer sequence, means more splits; what a sink divides is merged with one, too."""
    args, kwargs = decode_sample([50, 64, 7, 33, 60, 20, 41, 55], heads=48, split_size=64, sink=True).make(CPU)
    wide = torch.nn.functional.pad(args[3], (0, 3))
    alone, among = (decode(target, (*args[:3], table, *args[4:]), kwargs) for table in (args[3], wide))
    assert same(alone, among)
