"""Which of combine's kernels: points that are legal, tuned tables, the rule where they have no row, errors."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from backend_calls import BackendCalls
from built import require_built
from static_asserts import assert_compiles

import mla_suite
from mla_suite import archs
from mla_suite.archs import combine as config
from mla_suite.archs import combine_search
from mla_suite.archs.combine import CombineConfig
from mla_suite.archs.sm_90 import combine as sm_90_combine
from mla_suite.core import dispatch, tuning
from mla_suite.ops.combine import COMBINE, Problem

NATIVE = BackendCalls(COMBINE, "native")


def problem(rows, batch, splits, *, uniform=False, out_dtype=torch.bfloat16, head_dim_v=512):
    """`splits` partials of each of `batch` sequences in the mean, or of every one if `uniform`."""
    return Problem(batch, rows, head_dim_v, splits if uniform else 0, out_dtype, False, splits * batch)


@pytest.mark.parametrize("name", archs.names())
@pytest.mark.parametrize(
    ("partial", "out", "first", "vectors"),
    [
        (512, 512, 0, True),
        (516, 520, 0, True),
        (514, 512, 0, False),
        (512, 516, 0, False),  # 8 bytes of bf16 more
        (512, 512, 4, True),
        (512, 512, 2, False),
    ],
)
def test_rows_that_16_byte_accesses_do_not_reach_go_value_by_value(name, partial, out, first, vectors):
    """Rows of so many values, of which the partials begin at element `first` of their memory."""
    arch = archs.get(name)
    given = torch.zeros(first + 6 * 4 * partial)[first:].view(6, 4, partial)[..., :512], torch.zeros(6, 4)
    outputs = torch.zeros(2, 4, out).bfloat16()[..., :512], torch.zeros(2, 4)
    call = config.rule(arch, 512, 8, 3).spec(outputs, COMBINE.Args(*given, num_splits=3))
    assert (call.launches[0].kernel != config.unaligned(arch, 512).instance) == vectors


# Legal points


@pytest.mark.parametrize("head_dim_v", config.HEAD_DIMS_V)
@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_every_point_of_rows_and_vectors_is_legal(name, head_dim_v):
    for rows, vec in itertools.product(config.ROW_COUNTS, config.VECS):
        assert CombineConfig(archs.get(name), head_dim_v, rows, vec, waves=8, slices=1).parts >= 1


def test_what_a_search_tries_on_sm_90_compiles(tmp_path):
    vecs, waves = combine_search.TRIED_VECS, combine_search.TRIED_WAVES["nvidia"]
    tried = combine_search._legal(archs.get("sm_90"), 512, vecs, waves, (1,))
    sizes = {(point.rows, point.vec, point.waves) for point in tried}
    assert {size[:2] for size in sizes} == set(itertools.product(config.ROW_COUNTS, vecs))
    assert (4, 4, 8) not in sizes
    shape = (
        "struct Shape{0} {{ static constexpr int head_dim_v = 512, rows = {1}, vec = {2}, waves = {3}, slices = 1; }};"
    )
    run = "template __device__ void MergedRows::run<mla::Combine<Wave, Shape{0}>>(const mla::CombineParams&);"
    lines = [line.format(n, *size) for n, size in enumerate(sorted(sizes)) for line in (shape, run)]
    assert_compiles(tmp_path, ["combine/merged_rows.hpp"], lines)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(arch="sm_90", rows=4), "2 teams share a row's splits, and its kernels have one row in a block"),
        (dict(arch="sm_90", fixed_splits=16), "its kernels take any number of splits"),
        (dict(rows=3), "rows is one of 1, 2, 4, 8"),
        (dict(vec=16), "vec is one of 1, 2, 4, 8"),
        (dict(head_dim_v=192), "head_dim_v is one of 512, 256, 128"),
        (dict(waves=64), "takes 1..16 waves"),
        (dict(slices=0), "slices must divide head_dim_v into whole vectors"),
        (dict(slices=3), "slices must divide head_dim_v into whole vectors"),
        (dict(slices=64, vec=8), "1 lanes would share a row"),
        (dict(rows=8, waves=4), "4 waves hold 4 rows"),
        (dict(fixed_splits=7), "fixed_splits is one of 0, 16"),
        (dict(fixed_splits=16, vec=8, slices=8), "16 splits need a lane each of the 8"),
    ],
)
def test_an_illegal_point_is_one_sentence(change, why):
    point = dict(arch="gfx942", head_dim_v=512, rows=1, vec=4, waves=8, slices=1) | change
    with pytest.raises(ValueError, match=why) as error:
        CombineConfig(archs.get(point.pop("arch")), **point)
    assert "\n" not in str(error.value)


# Choosing


def cells(**change):
    row = dict(head_dim_v=512, out_dtype="bf16", device_units=304, rows=16, batch=1, splits=64, rows_per_group=2)
    row |= dict(vec=8, waves=8, slices=1, fixed_splits=0, kind="counted", date="2026-11-21", commit="0123456")
    return row | change


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes rows as the user's table for gfx942."""

    def write(*rows):
        folder = tmp_path / "combine"
        folder.mkdir(exist_ok=True)
        text = "\n".join([",".join(config.FORMAT.header), *(config.FORMAT.line(row) for row in rows)])
        (folder / "gfx942.csv").write_text(text + "\n")
        tuning.clear_cache()
        dispatch.clear_caches()

    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path))
    yield write
    tuning.clear_cache()
    dispatch.clear_caches()


@pytest.fixture
def everything_built(monkeypatch):
    monkeypatch.setattr(config, "has_kernel", lambda arch, instance: True)


def test_a_row_of_a_table_decides(table, everything_built):
    gfx942 = archs.get("gfx942")
    ruled, reason = config.choose(problem(16, 1, 64), gfx942)
    assert reason.startswith("rule")
    table(cells(), cells(batch=64))
    chosen, reason = config.choose(problem(16, 1, 64), gfx942)
    assert (chosen.rows, chosen.vec) == (2, 8)
    assert "gfx942.csv:2" in reason
    near, reason = config.choose(problem(16, 1, 66), gfx942)
    assert near == chosen
    assert "nearest" in reason
    assert config.choose(problem(16, 1, 512), gfx942)[0] == dataclasses.replace(ruled, waves=16)  # too far: the rule
    assert config.choose(problem(16, 1, 64, out_dtype=torch.float16), gfx942)[0] == ruled  # another dtype


def test_a_row_for_a_number_of_splits_decides_for_no_other(table, everything_built):
    gfx942 = archs.get("gfx942")
    table(cells(vec=4, splits=16, fixed_splits=16))
    chosen, reason = config.choose(problem(16, 1, 16, uniform=True), gfx942)
    assert (chosen.rows, chosen.fixed_splits) == (2, 16)
    assert chosen.instance.endswith("_splits-16")
    assert "gfx942.csv:2" in reason
    for splits, uniform in ((16, False), (17, True), (12, True)):
        other, reason = config.choose(problem(16, 1, splits, uniform=uniform), gfx942)
        assert other == config.rule(gfx942, 512, 16, splits)
        assert "is for 16 splits of every sequence" in reason


def test_a_row_whose_kernel_is_not_built_leaves_it_to_the_rule(table, caplog, monkeypatch):
    """The native kernel runs as without the row, and one warning says which row and which kernel."""
    table(cells(batch=2, splits=8, vec=2), cells(batch=64, splits=8, vec=2, rows_per_group=8))
    partial_out, partial_lse = torch.randn(16, 16, 512), torch.randn(16, 16)
    with mla_suite.emulate("gfx942") as gfx942:
        require_built("gfx942", config.choose(problem(16, 2, 8), gfx942)[0].instance)
        named = CombineConfig(gfx942, 512, rows=2, vec=2, waves=8, slices=1)
        built = config.has_kernel  # a developer's own cache may hold the point
        monkeypatch.setattr(config, "has_kernel", lambda arch, name: name != named.instance and built(arch, name))
        results = [mla_suite.combine(partial_out, partial_lse, num_splits=splits) for splits in (8, 8, 16)]
        choice = mla_suite.explain("combine", partial_out, partial_lse, num_splits=8)
    assert str(choice).startswith("combine on gfx942 -> native (gfx942): combine_dv-512_rows-1_vec-4")
    assert f"since {named.instance} of" in str(choice)
    warned = [record.getMessage() for record in caplog.records if "is not built" in record.getMessage()]
    assert len(warned) == 1, warned
    assert f"names kernel {named.instance}, which is not built for gfx942; the rule's kernel runs instead" in warned[0]
    assert "gfx942.csv:2" in warned[0]
    wanted = mla_suite.combine(partial_out, partial_lse, num_splits=8)
    torch.testing.assert_close(results[0], wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (cells(waves=4, rows_per_group=8), r"gfx942.csv:2: this configuration is not legal.*4 waves hold 4 rows"),
        (cells(vec=3), r"gfx942.csv:2: .*vec is one of 1, 2, 4, 8"),
        (cells(rows_per_group=0), r"gfx942.csv:2: rows_per_group is '0'"),
        (cells(microseconds=3), r"gfx942.csv:2: a counted row has a time"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(table, row, why):
    table(row)
    with pytest.raises(ValueError, match=why):
        config.choose(problem(16, 1, 64), archs.get("gfx942"))


def built_instances(name):
    from mla_suite.build.instances import instances

    kernels = ("combine", "persistent_combine", "resident_combine", "streaming_combine")
    return {item.id for item in instances(name) if item.kernel in kernels}


def all_up_to(last, most):
    """Every number up to `last`, and powers of two up to `most` with their neighbours."""
    powers = [1 << bits for bits in range(most.bit_length())]
    return sorted({*range(1, last + 1), *(near for power in powers for near in (power - 1, power, power + 1) if near)})


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm_90"])
def test_every_declared_combine_is_picked(name):
    """By the rules, or by a row of the shipped table; what neither picks would never run. All they pick is declared.

    Rules compare rows with compute units: every number of rows near those is asked.
    """
    record, path = archs.get(name), tuning.SHIPPED / "combine" / "tuned" / f"{name}.csv"
    assert tuning.lint(config.FORMAT, name, path) == ()
    picked = {config.config_of_row(record, row.values) for row in tuning.load(config.FORMAT, name, path)}
    rows, splits = all_up_to(4 * record.compute_units, config.MAX_ROWS // 2), all_up_to(128, 1 << 16)
    for head_dim_v, number in itertools.product(config.HEAD_DIMS_V, rows):
        picked |= {config.rule(record, head_dim_v, number, each) for each in splits}
        picked |= {config.invariant(record, head_dim_v, number), config.unaligned(record, head_dim_v)}
    declared = {instance for instance in built_instances(name) if instance.startswith("combine_")}
    instances = {point.instance for point in picked}
    assert sorted(instances - declared) == [], "a rule of archs/combine.py or a tuned row picks what arch.toml lacks"
    assert sorted(declared - instances) == [], "no rule of archs/combine.py and no tuned row picks what arch.toml has"


@pytest.mark.parametrize(
    ("rows", "batch", "kind"),
    [
        *((rows, batch, "persistent_combine") for rows, batch in ((1, 4225), (16, 300), (128, 34))),
        (512, 2000, "persistent_combine"),
        *((rows, 4224 // rows, "resident_combine") for rows in (1, 16, 128, 512)),
        *((rows, batch, "resident_combine") for rows, batch in ((1, 396), (16, 32), (64, 8))),
    ],
)
def test_few_workgroups_merge_what_a_plan_split(rows, batch, kind):
    """Up to 4,224 rows one of each unit. A merge that may not depend on the batch, or has no plan, stays what it is."""
    sm_90, merged, total = archs.get("sm_90"), problem(rows, batch, 2), rows * batch
    choices = partial(sm_90_combine.config_for, merged, sm_90)
    point = choices(fixed=False, planned=True)
    assert point.kernel == kind
    assert point.instance in built_instances("sm_90")
    if kind == "resident_combine":
        beside = choices(fixed=False, planned=True, merges=True)
        assert point.grid(total) == 132
        assert (beside.instance, beside.grid(total), beside.grid(7)) == (point.instance, 99, 7)
    else:
        assert point.grid(total) == min(2 * total, sm_90_combine.PLANNED_GROUPS * 132)
    assert choices(fixed=True, planned=True) == config.invariant(sm_90, 512, total)
    assert choices(fixed=False, planned=False) == config.choose(merged, sm_90)[0]
    for arch in (archs.get("gfx942"), archs.get("gfx950")):
        assert config.config_for(merged, arch, fixed=False) == config.choose(merged, arch)[0]


def test_rows_that_several_waves_would_share_stay_what_they_are():
    sm_90 = archs.get("sm_90")
    few = sm_90_combine.config_for(problem(5, 79, 2), sm_90, fixed=False, planned=True)
    assert few == config.choose(problem(5, 79, 4), sm_90)[0]


@pytest.mark.parametrize("runs", [2, 4])
@pytest.mark.parametrize(
    ("rows", "slices", "waves"),
    [(16, 4, 8), (34, 4, 8), (35, 2, 8), (64, 2, 8), (68, 2, 8), (69, 1, 8), (136, 1, 8), (137, 1, 4), (272, 1, 4)],
)
def test_rows_are_merged_while_decode_runs(rows, slices, waves, runs):
    """On sm_90, by as many workgroups for each as find room beside it."""
    sm_90 = archs.get("sm_90")
    point = sm_90_combine.streaming(problem(rows, 1, 64), sm_90, busy=64, runs=runs)
    assert point is not None
    assert point.instance in built_instances("sm_90")
    assert (point.slices, point.threads, point.grid(rows)) == (slices, 32 * waves, slices * rows)
    assert point.grid(rows) <= point.resident * 68


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        (dict(), True),
        (dict(rows=1, splits=128, busy=128), True),
        (dict(splits=129), False),
        (dict(rows=272), True),
        (dict(rows=273), False),
        (dict(busy=67), False),  # neighbours
        (dict(rows=8, busy=67), True),
        (dict(rows=64, busy=88, runs=4), True),  # which fill half as much
        (dict(rows=177, busy=88, runs=4), False),
        (dict(batch=16, busy=66), True),
        (dict(batch=17, busy=66), False),
        (dict(head_dim_v=128), False),
    ],
)
def test_which_rows_are_merged_while_decode_runs(changed, taken):
    facts = dict(head_dim_v=512, rows=16, batch=1, splits=64, busy=64, runs=2) | changed
    busy, runs = facts.pop("busy"), facts.pop("runs")
    assert (sm_90_combine.streaming(problem(**facts), archs.get("sm_90"), busy, runs) is not None) is taken
