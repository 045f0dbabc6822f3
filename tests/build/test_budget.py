"""Budgets on made-up costs: what no declaration may allow, and what counts as LDS."""

from dataclasses import replace

import pytest
from sample_tree import edit, make

from mla_suite.build import BuildError, budget, build, builder, report
from mla_suite.build.instances import instances
from mla_suite.build.report import Resources

COST = Resources(
    threads=256, registers=64, vgprs=64, agprs=0, sgprs=32, lds=1024, scratch=0, spills=0, scalar_spills=0,
    code_bytes=400, params=40, loop=None,
)  # fmt: skip


@pytest.fixture
def item(tmp_path):
    found = next(i for i in instances("gfx942", make(tmp_path / "csrc")) if i.constants["THREADS"] == 256)
    return replace(found, budget={})


def test_a_kernel_within_its_budget(item):
    assert budget.broken(item, COST) == []


@pytest.mark.parametrize(
    ("cost", "declared", "sentence"),
    [
        ({"spills": 2, "scalar_spills": 2}, {}, "spills is 2 (2 of them scalar), at most 0 is allowed"),
        ({"spills": 2}, {"spills": 9}, "spills is 2 (0 of them scalar), at most 0 is allowed"),
        ({"scratch": 16}, {"scratch": 64}, "scratch is 16, at most 0 is allowed"),
        ({"lds": 65536 + 4}, {}, "lds is 65540, at most 65536 is allowed"),
        ({"registers": 600}, {}, "min_occupancy is 0, at least 1 is required"),
        ({"registers": 600}, {"min_occupancy": 2}, "min_occupancy is 0, at least 2 is required"),
    ],
)
def test_a_broken_rule_is_one_sentence_with_both_numbers(item, cost, declared, sentence):
    broken = budget.broken(replace(item, budget=declared), replace(COST, **cost))
    assert f"gfx942 scale_threads-256: {sentence}" in broken


def test_matrix_products_that_wait_for_each_other(item):
    log = (
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non "
        "wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage in "
        "the function 'scale'\n"
    )
    assert report.serialization(log, "other") == ""
    cost = replace(COST, serialized=report.serialization(log, "scale"))
    (sentence,) = budget.broken(item, cost)
    assert sentence.startswith("gfx942 scale_threads-256: ptxas makes every wgmma wait for the one before, due to non ")
    assert sentence.endswith("of the pipeline stage")


def test_dynamic_lds_counts(item):
    with_dynamic = replace(item, dynamic_lds=4096, budget={"lds": 5000})
    assert budget.broken(with_dynamic, COST) == ["gfx942 scale_threads-256: lds is 5120, at most 5000 is allowed"]


def test_a_parameter_struct_of_another_size(csrc, tmp_path, monkeypatch):
    honest = builder.report.read_assembly
    monkeypatch.setattr(builder.report, "read_assembly", lambda *given: replace(honest(*given), params=36))
    with pytest.raises(BuildError, match=r"gfx942 scale_threads-64: takes 36 bytes, but mla::ScaleParams has 40"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")


def test_unknown_rules_of_a_budget_and_those_that_cannot_be_measured(csrc, tmp_path):
    path = csrc / "gfx942" / "arch.toml"
    edit(path, "lds = 1024", "ldss = 128")
    with pytest.raises(BuildError, match=r"unknown budget keys \['ldss'\]; possible are spills, scratch, lds"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")
    edit(path, "ldss = 128", "matrix_per_token = 1")
    with pytest.raises(BuildError, match="matrix_per_token is budgeted at 1, but there is no main loop or no tokens"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")
