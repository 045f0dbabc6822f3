"""The command line teaches: every command has help, and a wrong one names those that exist."""

import json

import pytest

from mla_suite.__main__ import main
from mla_suite.cli import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["decoed"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert all(command in error for command in COMMANDS)


def test_no_command_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    listing = capsys.readouterr().out
    assert all(summary in listing for summary in COMMANDS.values())


def test_demo_reports_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--tokens", "4", "--layers", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_decoded"] == 16
    assert report["cache_bytes_per_token_and_layer"] == 1152
    # bf16 weights and activations against fp32: 8 bits of mantissa through one layer, logits of order 1
    assert report["largest_logit_difference"] < 0.05 * report["largest_logit"]
    assert report["backends"]["decode"].startswith("decode on cpu -> reference")


def test_emulate_reports_numbers_counters_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "decode", "--heads", "16", "--kv", "200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["explanation"].startswith("decode on gfx942 -> native")
    assert max(report["largest_difference"]) < 1e-2
    launch = report["launches"][0]
    assert launch["findings"] == []
    # 17 keys x 16 rows of bf16 products are one pass of 4 clocks for 16 x 16 x 16: 2 x 16 x (576 + 512) FLOP per key
    assert launch["bound_clocks"]["matrix"] == pytest.approx(208 * 17, rel=0.01)
    assert launch["bytes_loaded"]["kv_cache"] >= 200 * 1152


def test_emulate_names_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate"]) == 0
    assert "sparse_decode" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="combine has no sample 'nothing'; it has"):
        main(["emulate", "combine", "nothing"])
