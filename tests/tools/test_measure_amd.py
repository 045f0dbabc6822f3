"""The first hour's measurements, as a dry run: each loop gives back the constant that the model of time has."""

from __future__ import annotations

import json
from pathlib import Path

import measure_amd
import pytest
from built import require_built

from mla_suite.__main__ import main
from mla_suite.bench import calibrate


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_dry_run_finds_the_model_itself(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_built(arch, "decode_dtype-bf16_rows-128_width-576_rotate-0")
    file = tmp_path / "numbers.json"
    assert measure_amd.main([str(file), "--dry", arch]) == 0
    about, constants = calibrate.read(file)
    assert about == f"{arch}, emulated {arch}: MODELLED by a dry run, nothing was measured"
    found = {constant.name: constant for constant in constants}
    for name in ("launch_us", "memory_latency", "memory_rate", "lds_rate", "barrier", "branch", "scalar_latency"):
        assert found[name].measured == pytest.approx(found[name].today, rel=0.05), name
    assert found["decode's clocks per key"].measured == pytest.approx(found["decode's clocks per key"].today, rel=0.2)
    capsys.readouterr()
    assert main(["tune", "--calibrate", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "memory_latency: 790 today, 790 of this file" in printed
    assert "nothing is stored" in printed


def test_another_file_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps({"arch": "gfx942"}))
    assert main(["tune", "--calibrate", str(file)]) == 2
    assert "is no file of tools/measure_amd.py: KeyError: 'numbers'" in capsys.readouterr().err
