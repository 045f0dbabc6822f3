"""The command line teaches: every command has help, and a wrong one names those that exist."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_suite
from mla_suite.__main__ import main
from mla_suite.build import manifest
from mla_suite.cli import COMMANDS, demo_emulated, demo_layers, demo_model
from mla_suite.core import dispatch
from mla_suite.launch import launcher
from mla_suite.models import MLAConfig


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_the_command(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_unknown_command_lists_the_known(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["decoed"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert all(command in error for command in COMMANDS)


@pytest.mark.parametrize("command", ["formats", "emulate"], ids=["rich", "print"])
def test_a_reader_that_stops_early_ends_a_command_quietly(command):
    arguments = [sys.executable, "-m", "mla_suite", command]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 1


def test_no_command_prints_the_list(capsys):
    assert main([]) == 2
    listing = capsys.readouterr().out
    assert all(summary in listing for summary in COMMANDS.values())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("explain foo", "explain: no operator 'foo'; registered are "),
        ("explain decode --on sm_91", "explain: unknown arch 'sm_91': known are gfx942, gfx950, sm_90"),
        ("explain decode --heads 16 --kv 64", "for an arch: add --on ARCH"),
        ("explain --on sm_90 --heads 16 --kv 64", "needs an operator: decode or sparse_decode"),
        ("explain plan --on sm_90 --heads 16 --kv 64", "is one of decode or sparse_decode, not of plan"),
        ("explain decode --on sm_90 --kv 64", "explain: a problem of decode needs --heads"),
        (f"explain decode --on sm_90 --heads 16 --kv {10**20}", "a problem of more values than a tensor holds"),
        (f"explain decode --on sm_90 --heads {10**19} --kv 64", "a problem of more values than a tensor holds"),
        ("explain decode --on sm_90 --heads 16 --kv 64 --topk 8", "--topk is not an option of decode; it takes --kv"),
        ("explain decode --on sm_90 --heads 16 --kv -1", "--kv -1; it is a number of keys, 0 at least"),
        ("explain decode --on sm_90 --heads 16 --kv 64 --kv-format nope", "explain: kv_format 'nope' is unknown"),
        ("explain decode --on sm_90 --heads 1 --kv 9 --split-size 4 --num-splits 2", "num_splits"),
        (
            "explain sparse_decode --on gfx942 --heads 16 --topk 8 --time",
            "--time models problems of decode alone; leave out",
        ),
        ("explain decode --time", "on an AMD arch: add --on gfx942"),
        ("demo --kv-format v41", "demo: MLA: kv_format 'v41' holds rows of 512 values; this layer caches rows of 576"),
        ("demo --kv-format nope", "demo: kv_format 'nope' is unknown; the kv_formats are bf16, "),
        ("demo --emulate sm_90", "demo: sm_90 is not emulated; the emulator executes gfx942 and gfx950"),
        ("demo --emulate gfx90a", "demo: unknown arch 'gfx90a': known are gfx942, gfx950, sm_90"),
        (
            "demo --emulate gfx942 --kv-format fp16 --layers 2 --tp 4",
            "demo: --emulate runs single layers of its own, and no decoder: leave --kv-format, --tp out",
        ),
        ("emulate cmobine", "emulate: no operator 'cmobine'; registered are "),
        ("emulate combine nothing", "emulate: combine has no sample 'nothing'; it has "),
        ("emulate combine --on gfx900", "emulate: unknown arch 'gfx900': known are gfx942, gfx950, sm_90"),
        ("emulate combine --on sm_90", "emulate: sm_90 is not emulated"),
        ("emulate decode --q-len 4", "emulate: a problem of your own is one of decode"),
        ("emulate combine --heads 4 --kv 64", "emulate: a problem of your own is one of decode"),
        ("emulate decode --heads 4 --kv 100000000000", "emulate: decode: max_seqlen_kv is 100000000000; it takes"),
        ("emulate decode --heads 4 --kv 2000000000", "emulate: the problem takes about "),
        ("emulate decode --heads 4 --kv -5", "emulate: --kv -5; it is a number of keys, 0 at least"),
        ("build --arch= --kernel combine --out /dev/null/none", "build: unknown arch '': this tree has "),
        ("build --arch gfx942 --kernel= --out /dev/null/none", "build: unknown kernels ['']: possible are "),
        ("bench --device cpu --set fast", "bench: no set of shapes 'fast'; there are quick, flashmla"),
        ("bench --device cpu --op plan", "bench: set 'quick' has no case of 'plan'"),
        ("bench --device cpu --shapes b999", "bench: no shape contains b999; they are decode-b2-h16-q1-kv64"),
        ("bench --device cpu --sustained -1", "bench: --sustained -1.0: it takes 0 to 60 seconds"),
        ("bench --device cpu --csv /dev/null/rows.csv", "bench: /dev/null/rows.csv cannot be written"),
        ("demo --tp 2", "run `torchrun --nproc-per-node 2 -m mla_suite demo --tp 2`"),
        ("tune", "name an operator with --op"),
        ("tune --op decode", "no GPU: configurations are compared by timing them"),
    ],
)
def test_a_wrong_argument_is_one_sentence(words, sentence, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in line


def test_emulate_describes_the_options_of_decode_alone(capsys):
    for command, has_sparse in (("emulate", False), ("explain", True)):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = capsys.readouterr().out.partition("a problem of your own")[2]
        assert ("v32" in options) is ("--topk" in options) is has_sparse


def test_a_folder_that_hides_the_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr(mla_suite, "__file__", None)  # as of a folder without __init__.py, a clone seen from above
    assert main(["formats"]) == 2
    assert capsys.readouterr().err.startswith(f"the folder {mla_suite.__path__[0]} hides the installed package")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("demo --tokens 0", "argument --tokens: '0'; it takes a whole number of 1 or more"),
        ("demo --layers two", "argument --layers: 'two'; it takes a whole number of 1 or more"),
        ("formats --page-size -1", "argument --page-size: '-1'; it takes a whole number of 1 or more"),
        ("explain --device gpu", "argument --device: 'gpu' is not a torch device; examples are cpu, cuda and cuda:1"),
        ("bench --device gpu", "argument --device: 'gpu' is not a torch device; examples are cpu, cuda and cuda:1"),
        ("explain --device cuda:99", "GPUs that torch can use"),
        ("bench --rounds 0", "argument --rounds: '0'; it takes a whole number of 1 or more"),
        ("bench --iters 0", "argument --iters: '0'; it takes a whole number of 1 or more"),
        ("build --jobs 0", "argument --jobs: '0'; it takes a whole number of 1 or more"),
        ("build --arch none --out=", "argument --out: it is empty; it takes the path of a folder"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(words, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(sentence)


def test_explain_says_what_each_parameter_of_a_launch_is(capsys):
    with launcher.declared_kernels():
        for call in (
            "explain decode --on sm_90 --batch 32 --heads 128 --kv 4096 --launches",
            "explain sparse_decode --on gfx942 --heads 128 --topk 2048 --launches",
        ):
            assert main(call.split()) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for words in (
        "page_ids block_table // [batch, page_ids_stride], or [kv_indptr[batch]]",
        "kv_page_stride 36864 // between pages",
        "heads 128 // query heads",
        "cache_0 kv_caches[0] // [pages, page, token bytes]",
        "partial_out scratch partial_out // [splits, rows, D_V], each row contiguous; rows = q_len x heads",
    ):
        assert words.split() in shown, words
    assert any(line[:4] == ["kv_map", "map", "of", "kv_cache:"] for line in shown)
    assert not any(line[:1] == ["attn_sink"] for line in shown), "null pointers are left out"


def test_explain_says_where_there_are_no_launches(capsys):
    assert main(["explain", "plan", "--device", "cpu", "--launches"]) == 0
    assert "no launches to show: reference serves it" in capsys.readouterr().out


@pytest.fixture
def not_compiled(monkeypatch):
    """Most of a demo's time is Inductor's; CI runs the command as users do, compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.usefixtures("not_compiled")
def test_demo_reports_for_machines(capsys):
    assert main(["demo", "--json", "--tokens", "4", "--layers", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_decoded"] == 16
    assert report["cache_bytes_per_token_and_layer"] == 1152
    assert report["problems"] == []
    assert 0 < report["largest_logit_difference"] < report["largest_difference_allowed"] < report["largest_logit"]
    assert report["backends"]["decode"].startswith("decode on cpu -> reference")


@pytest.mark.usefixtures("not_compiled")
def test_demo_fails_where_results_differ_too_much(capsys, monkeypatch):
    monkeypatch.setattr(demo_model, "MAX_BF16_DIFFERENCE", 1e-6)
    assert main(["demo", "--tokens", "2", "--layers", "1"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "8 tokens after ragged prompts" in printed


@pytest.mark.parametrize(
    ("arch", "sparse", "kernels"),
    [
        ("gfx942", [False] * 4 + [True], ("decode_rotated_dtype_bf16", "sparse_decode")),
        (
            "gfx950",
            [False] * 3 + [True],
            ("bf16 cache", "fp8 cache", "decode_dtype_bf16", "decode_fp8", "sparse_decode"),
        ),
    ],
)
def test_demo_runs_whole_layers_on_an_emulated_gpu(arch, sparse, kernels, capsys):
    assert main(["demo", "--emulate", arch, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert ["dsv4 pools" in part["title"] for part in report["parts"]] == sparse
    found = []
    for part in report["parts"]:
        op = "sparse_decode" if "dsv4 pools" in part["title"] else "decode"
        assert {part["backends"][name]["backend"] for name in ("plan", "append_kv", op)} == {"native"}
        assert {each["backend"] for each in part["backends"].values()} == {"native"}
        assert part["largest_difference"]["cache"] == 0
        assert 0 < part["largest_difference"]["y"] < 8e-3 + 2e-2 * part["largest_y"]
        attention = next(launch for launch in part["launches"] if launch["kernel"].startswith(op))
        assert attention["bound"] == "memory" or (attention["bound"], arch) == ("matrix", "gfx950")
        found.append(f"{part['title']}: {attention['kernel']}")
    assert all(words in " ".join(found) for words in kernels), found


@pytest.fixture
def one_narrow_layer(monkeypatch):
    """The demo on gfx942 is one step of one sequence through a layer of few weights."""
    narrow = replace(MLAConfig.gpu_mode_2025(), hidden_size=256)
    monkeypatch.setattr(demo_layers.MLAConfig, "gpu_mode_2025", lambda: narrow)
    monkeypatch.setattr(demo_layers, "GPU_MODE_BATCHES", (1,))
    monkeypatch.setattr(demo_layers, "GPU_MODE_PREFILLS", (16,))
    monkeypatch.setattr(demo_emulated, "parts", lambda arch: [("the first layer", demo_layers.gpu_mode_layer)])


@pytest.mark.usefixtures("one_narrow_layer")
def test_demo_fails_on_a_finding_and_on_a_wrong_number(capsys, monkeypatch):
    record = demo_emulated.launch_record

    def with_a_finding(report: Any, arch: Any, keys: int) -> dict[str, Any]:
        return record(report, arch, keys) | {"findings": ["made [up]"] if report.kernel.startswith("append") else []}

    monkeypatch.setattr(demo_emulated, "launch_record", with_a_finding)
    monkeypatch.setattr(demo_emulated, "ATOL", 0.0)
    monkeypatch.setattr(demo_emulated, "RTOL", 0.0)
    assert main(["demo", "--emulate", "gfx942"]) == 1
    printed = capsys.readouterr().out
    assert "append_kv_tokens_1: made [up]" in printed
    assert "values differ by up to" in printed
    assert "2 problems" in printed


@pytest.mark.usefixtures("one_narrow_layer")
def test_demo_fails_where_a_kernel_did_not_run(capsys, monkeypatch):
    """Without decode's kernels its reference runs: the numbers agree, and the demo says what is wrong."""
    built = manifest.built
    without = lambda arch: {name for name in built(arch) if not name.startswith("decode")}  # noqa: E731
    monkeypatch.setattr(manifest, "built", without)
    dispatch.clear_caches()
    try:
        assert main(["demo", "--emulate", "gfx942"]) == 1
    finally:
        dispatch.clear_caches()
    printed = " ".join(capsys.readouterr().out.split())
    assert "decode must run native on gfx942, and reference ran it" in printed
    assert "is not built for gfx942; run `python -m mla_suite build`" in printed
    assert "combine must run native on gfx942, and nothing ran it" in printed


def test_a_wrong_arch_in_the_environment_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "EMULATED_BY_ENVIRONMENT", "gfx000")
    launcher._environment.cache_clear()
    try:
        assert main(["explain", "plan"]) == 2
    finally:
        launcher._environment.cache_clear()
    assert capsys.readouterr().err.startswith("explain: MLA_SUITE_EMULATE=gfx000: unknown arch 'gfx000'")


def test_demo_needs_a_reference_beside_the_emulator(capsys):
    with mla_suite.emulate("gfx942"):  # as MLA_SUITE_EMULATE does
        assert main(["demo", "--emulate", "gfx950"]) == 2
    assert "MLA_SUITE_EMULATE=gfx942 leaves no reference to compare with; unset it" in capsys.readouterr().err


def test_demo_compares_values_and_bytes():
    exact = torch.tensor([1.0, -2.0])
    assert demo_emulated._compared("y", exact, exact + torch.tensor([0.027, 0]))[1] == ""
    assert (
        "1 values differ by up to 2.90e-02" in demo_emulated._compared("y", exact, exact + torch.tensor([0.029, 0]))[1]
    )
    assert demo_emulated._compared("y", exact, exact * torch.nan)[1] != ""
    stored = torch.tensor([3, 4], dtype=torch.uint8)
    assert demo_emulated._compared("cache", stored, stored + 1) == (2.0, "cache: 2 bytes differ from the reference's")


def test_emulate_reports_numbers_counters_and_findings(capsys):
    assert main(["emulate", "decode", "--heads", "16", "--kv", "200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["explanation"].startswith("decode on gfx942 -> native")
    assert max(report["largest_difference"]) < 1e-2
    launch = report["launches"][0]
    assert launch["findings"] == []
    # 17 keys x 16 rows of bf16 products are one pass of 4 clocks for 16 x 16 x 16: 2 x 16 x (576 + 512) FLOP per key
    assert launch["bound_clocks"]["matrix"] == pytest.approx(208 * 17, rel=0.01)
    assert launch["bytes_loaded"]["kv_cache"] >= 200 * 1152


@pytest.mark.parametrize("kv_format", ["v32", "dsv4"])
def test_emulate_fails_where_the_reference_served(kv_format, capsys):
    """It differs by nothing from itself."""
    assert main(["emulate", "decode", "--on", "gfx942", "--heads", "16", "--kv", "64", "--kv-format", kv_format]) == 1
    printed = capsys.readouterr()
    assert f"not native: kv_format {kv_format}" in printed.out
    assert printed.err == "emulate: nothing ran on an emulated gfx942: decode chose another backend\n"


@pytest.mark.parametrize(
    ("op", "instruction", "sentence"),
    [
        ("combine", ("v_pk_add_f32", "v_pk_mul_f32"), "out at [0, "),
        ("plan", ("v_max_i32_dpp", "v_min_i32_dpp"), "the output at ["),
        (
            "append_kv",
            ("global_store_dwordx4", "; global_store_dwordx4"),
            "kv_cache has other bytes than the reference",
        ),
    ],
)
def test_emulate_fails_on_a_wrong_number(op, instruction, sentence, capsys, altered_kernels):
    altered_kernels(lambda entry, text: text.replace(*instruction))
    assert main(["emulate", op]) == 1
    printed = capsys.readouterr()
    assert "sanitizer: no findings" in printed.out
    assert printed.err.startswith(f"emulate: {sentence}")


def test_emulate_prints_findings_with_their_source_lines(capsys, altered_kernels):
    altered_kernels(lambda entry, text: text.replace("\ts_barrier\n", "\n", 1))
    assert main(["emulate", "combine"]) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"lds_race: combine_\S+: `ds_read.*` at \S*csrc/common/combine.hpp:\d+: wave \d+ touched the same", printed
    )
    assert "sanitizer: see above" in printed


def test_emulate_names_what_exists(capsys):
    assert main(["emulate"]) == 0
    assert "sparse_decode" in capsys.readouterr().out


def test_a_bug_in_a_command_keeps_its_traceback(monkeypatch):
    """Only a UsageError becomes one line: a ValueError of any depth would hide where it was raised."""

    def run(_):
        raise ValueError("not enough values to unpack")

    monkeypatch.setattr("mla_suite.cli.formats.run", run)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        main(["formats"])
