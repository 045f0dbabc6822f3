"""The README's Python is whole, and its tables are what the tree and the emulator give; figures: test_figures.py."""

import ast
import json
import re
from pathlib import Path

import pytest
import support
import torch
from built import require_dense

from mla_suite import archs
from mla_suite.__main__ import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_lines_for_a_gpu_run_without_one(monkeypatch):
    """The block asks for CUDA; on the CPU the same lines are run with the device taken out, as the README says."""
    (block,) = re.findall(r"```python needs=gpu\n(.*?)```", README, re.S)
    ast.parse(block)
    smaller = block.replace(', device="cuda"', "").replace("8000", "80")
    assert "cuda" not in smaller
    names: dict[str, object] = {}
    torch._dynamo.reset()
    exec(compile(smaller, "README.md", "exec"), names)
    out, lse = names["out"], names["lse"]
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert (tuple(out.shape), tuple(lse.shape)) == ((8, 1, 128, 512), (8, 1, 128))


def test_support_table_is_current():
    made, bad = support.table()
    assert bad == []
    assert support.section(README, "support") == f"{made}\n", "run `python tools/support.py --write README.md`"


def test_a_wrong_record_is_a_sentence_and_the_status_is_1(monkeypatch, capsys):
    good, _ = archs.specs()
    monkeypatch.setattr(archs, "specs", lambda: (good, {"sm_100": "arch sm_100: wavefront 48; nvidia has (32,)"}))
    assert support.main([]) == 1
    printed = capsys.readouterr()
    assert printed.err == "support: arch sm_100: wavefront 48; nvidia has (32,)\n"
    assert printed.out.startswith("| operator | gfx942 | gfx950 | sm_90 |")


@pytest.mark.parametrize(
    ("row", "arch", "more"),
    [
        ("gfx942 bf16", "gfx942", ""),
        ("gfx950 fp8", "gfx950", "--kv-format fp8 --q-dtype float8_e4m3fn"),
    ],
)
def test_the_amd_counts_are_what_its_commands_print(row, arch, more, capsys):
    require_dense(arch)
    command = f"emulate decode --on {arch} --heads 128 --kv 1024 --num-splits 1"
    assert (f"`python -m mla_suite {command}`" if arch == "gfx942" else f"`{more}`") in README
    assert main([*command.split(), *more.split(), "--json"]) == 0
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    (cells,) = re.findall(rf"\| {row}, 128 heads \| [\d.]+ / ([\d.]+) \| [\d.]+ / ([\d.]+) \|", README)
    counted = launch["per_key"]
    assert [float(cell) for cell in cells] == pytest.approx([counted["instructions"], counted["matrix"]], abs=0.05)
