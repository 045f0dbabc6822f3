"""benchmarks/scale_model.py, whose tables are in docs/scale.md, agrees with what was measured."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODEL = runpy.run_path(str(ROOT / "benchmarks" / "scale_model.py"))


def errors(lines: str) -> list[int]:
    """The percentages in a table."""
    return [
        int(cell.removesuffix(" %"))
        for cell in lines.replace("|", "\n").split("\n")
        for cell in [cell.strip()]
        if cell.endswith(" %")
    ]


def test_lines_of_collectives_pass_through_what_was_measured():
    found = errors(MODEL["collectives"]())
    assert len(found) == 18
    assert max(map(abs, found)) <= 17


def test_floors_of_layers_are_below_what_was_measured():
    found = errors(MODEL["layers"]())
    assert len(found) == 15
    assert max(found) < 0
    assert min(found) >= -42
    for row in (row for what, row in MODEL["MEASURED"].items() if what.startswith("layer")):
        kv_len = int(row["what"].split()[-1])
        one, two = (MODEL["tensor_parallel"](MODEL["H200"], ranks, 128, kv_len) for ranks in (1, 2))
        assert abs(float(row["many_us"]) / float(row["one_us"]) - two / one) < 0.12


def test_a_collective_costs_what_its_way_sends():
    h200 = MODEL["H200"]
    line = MODEL["PEER_MEMORY"]["sum"]
    # Through peer memory each of 7 others gets the whole summand of 2 x 7168 bytes.
    assert h200.collective("sum", 1, 8) == pytest.approx(line.latency + 7 * 14336 * line.per_byte)
    # 128 tokens are summed in two exchanges, in which a rank sends its part of the sum to 7 others, and theirs to them.
    in_two = (128 * 14336 * 2 * 7 / 8 + MODEL["SECOND_EXCHANGE_BYTES"]) * line.per_byte
    assert h200.collective("sum", 128, 8) == pytest.approx(line.latency + in_two)
    # 1,400 tokens do not fit the 18 MB that eight ranks share.
    ring = MODEL["NCCL"]["sum"]
    sent = 1400 * 14336 * 2 * 7 / 8
    assert h200.collective("sum", 1400, 8) == pytest.approx(ring.latency + sent * ring.per_byte)
    assert h200.collective("sum", 1, 16) == pytest.approx(20e-6 + 14336 * 2 * 15 / 16 / 50e9)
    slower = replace(h200, link_to_peer=h200.link / 4)
    assert slower.collective("merge", 128, 2) > 3 * h200.collective("merge", 128, 2)
    assert slower.collective("merge", 128, 8) == h200.collective("merge", 128, 8)
