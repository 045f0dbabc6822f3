"""Bounds that pytest-benchmark tracks without a GPU: of kernels that are right and break no rule, and of no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import counted_bounds as bounds
import pytest
from built import require_objects

from mla_suite import archs as arch_records
from mla_suite.bench import sets
from mla_suite.emulator import Report, machine
from mla_suite.emulator.report import Finding

CASE = sets.combine(4, 16, 8)
BROKEN = Finding("lds_race", "combine", "ds_read_b32 v1, v0", "combine.hpp:9", 0, 1, 1, "0x0", 1, "made up")


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request: pytest.FixtureRequest) -> str:
    require_objects()
    name: str = request.param
    return name


def test_bounds_are_clocks_of_one_compute_unit(arch: str) -> None:
    found = bounds.count(CASE, arch)
    assert found.failure == ""
    assert 0 < found.error < 5e-3
    record = arch_records.get(arch)
    least = CASE.sample.bytes * record.clock_mhz * 1e6 / record.memory_bytes_per_s
    # Every lane's bytes are counted, and each lane of a row reads the row's lse.
    assert least <= found.clocks["memory"] < 1.5 * least
    assert found.clocks["vector"] > 0
    assert found.clocks["matrix"] == 0


@pytest.mark.parametrize("count", [1, 2])
def test_what_the_sanitizer_objects_to_has_no_bounds(arch: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = machine.Emulator.launch

    def found_out(*arguments: Any, **options: Any) -> Report:
        return replace(honest(*arguments, **options), findings=(BROKEN,) * count)

    monkeypatch.setattr(machine.Emulator, "launch", found_out)
    result = bounds.count(CASE, arch)
    assert result.wrong
    assert result.failure.startswith("the emulator's sanitizer found lds_race: combine: `ds_read_b32 v1, v0`")
    assert result.failure.endswith("(and 1 more)") == (count == 2)
    assert result.clocks == {}


def test_a_large_case_without_a_plan_is_not_emulated() -> None:
    found = bounds.count(sets.decode(64, 128, 8192), "gfx942")
    assert "operations without a plan are too many to emulate" in found.failure
    assert not found.wrong


@pytest.mark.parametrize("name", [name for name in sets.SETS if name != "extend"])
def test_no_case_of_a_published_set_is_too_large(name: str) -> None:
    """Row tiles of an extend differ in their keys, so that no workgroup of a large one stands for the others."""
    assert [case.id for case in sets.named(name) if not bounds.countable(case)] == []
