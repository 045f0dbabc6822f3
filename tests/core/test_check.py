"""Check mode: a planted wrong kernel is reported within n calls and its file replays; a right kernel never is."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import random_problems
import torch
from built import require_built
from hostile_inputs import in_turn

import mla_suite
from mla_suite.__main__ import main
from mla_suite.build.manifest import KernelEntry
from mla_suite.core import check_mode, checks, dispatch, register, saved_call
from mla_suite.errors import WrongResult
from mla_suite.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_suite.ops.decode.samples import decode_sample

ARCHS = ("gfx942", "gfx950")
CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent.parent
MASK = r"v_cmp_lt_u32_e32 vcc, (v\d+|[1-9]\d*), v\d+", "v_cmp_lt_u32", "v_cmp_ge_u32"
"""Lines of decode's machine code that ask whether a row sees a key by its position, and what they become."""
FAULTS = {
    "append_kv": (1, (r"0x7fff\b", "0x7fff", "0xfff")),  # half a unit of bf16, which rounding adds
    "combine": (0, (r"v_sub_f32_e32", "v_sub_f32", "v_add_f32")),  # of the largest lse
    "plan": (0, (r"v_min_u32", "v_min_u32", "v_max_u32")),
    "sparse_decode": (2, (r"v_exp_f32_e32", "v_exp_f32", "v_mov_b32")),
}
"""Operators -> a sample whose kernel the fault breaks without breaking a rule of the emulator, and the fault."""


@pytest.fixture(autouse=True)
def needs_kernels():
    for arch in ARCHS:
        require_built(arch, "decode_dtype-bf16_rows-32_width-576_rotate-0")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where check mode saves calls."""
    monkeypatch.setenv("MLA_SUITE_CHECK_DIR", str(tmp_path))
    monkeypatch.setattr(saved_call, "_numbers", itertools.count())
    return tmp_path


@pytest.fixture
def reports(caplog):
    """Messages that were logged since the last call."""
    caplog.set_level(logging.WARNING)

    def logged() -> list[str]:
        found = [entry.getMessage() for entry in caplog.records]
        caplog.clear()
        return found

    return logged


@pytest.fixture
def plant(altered_kernels):
    """plant(op, line, old, new): from now on `old` is `new` in the lines of the operator's machine code that match.

    Without a fault the kernels are as they were built.
    """

    def put(op: str = "", line: str = "", old: str = "", new: str = "") -> None:
        def change(entry: KernelEntry, text: str) -> str:
            if not op or not entry.id.startswith(op):
                return text
            return "\n".join(each.replace(old, new) if re.search(line, each) else each for each in text.split("\n"))

        altered_kernels(change)

    return put


@pytest.fixture
def problem():
    return decode_sample((130, 40), heads=16, q_len=2, num_splits=1).make(CPU)


def assert_replays(folder: Path, plant: Callable[..., None]) -> None:
    """The only call that was saved is wrong again with the fault that is planted, and right without it."""
    (file,) = folder.iterdir()
    assert main(["replay", str(file)]) == 1
    plant()
    assert main(["replay", str(file)]) == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_a_flipped_mask_is_reported_within_n_calls_and_its_file_replays(arch, plant, problem, reports, folder, capsys):
    args, kwargs = problem
    with mla_suite.emulate(arch), mla_suite.check(4):
        for _ in range(3):
            mla_suite.decode(*args, **kwargs)
        assert reports() == []
        plant("decode", *MASK)
        for _ in range(4):
            mla_suite.decode(*args, **kwargs)
    (report,) = reports()
    (file,) = folder.iterdir()
    assert report.startswith("decode ran as native (decode_dtype-bf16_rows-")
    assert f") on an emulated {arch} and is wrong: out at [0, 0, 0, 0] is " in report
    assert "values are too far off, the furthest by " in report
    assert "q (2, 2, 16, 576) bfloat16, kv_cache " in report
    assert report.endswith(f"run it again with: python -m mla_suite replay {file}")
    assert file.stat().st_mode & 0o077 == 0

    assert main(["replay", str(file)]) == 1
    printed = capsys.readouterr().out
    assert report.split("; run it")[0] in printed
    assert re.search(
        rf"here: decode runs as native .* on an emulated {arch}\nwrong: out at \[0, 0, 0, 0\] is ", printed
    )
    assert main(["replay", str(file), "--backend", "reference"]) == 0
    plant()
    assert main(["replay", str(file)]) == 0
    assert "\nright: every value" in capsys.readouterr().out


@pytest.mark.parametrize("op", FAULTS)
def test_every_operator_is_checked_and_replays(op, plant, reports, folder):
    sample, fault = FAULTS[op]
    args, kwargs = register.get(op).samples()[sample].make(CPU)
    plant(op, *fault)
    with mla_suite.emulate("gfx942"), mla_suite.check():
        getattr(torch.ops.mla_suite, op)(*args, **kwargs)
    (report,) = reports()
    assert report.startswith(f"{op} ran as native ")
    assert_replays(folder, plant)


def test_a_replay_has_the_splits_of_the_call(plant, reports, folder):
    """A bound of 473 keys counts as 476, for which gfx942 makes eight splits, where 473 would not be split."""
    (q, cache, *rest), kwargs = decode_sample((200,), heads=16, page=16).make(CPU)
    plant("combine", *FAULTS["combine"][1])
    with mla_suite.emulate("gfx942"), mla_suite.check():
        mla_suite.decode(q, cache, *rest, **kwargs | {"max_seqlen_kv": 473})
    (report,) = reports()
    assert report.startswith("decode ran as native ")
    assert_replays(folder, plant)


def test_every_overload_and_compiled_code_are_checked(plant, problem):
    (q, *rest), kwargs = problem
    plant("decode", *MASK)
    out, lse = torch.empty(2, 2, 16, 512, dtype=q.dtype), torch.empty(2, 16, 2).transpose(1, 2)
    compiled = torch.compile(lambda q: mla_suite.decode(q, *rest, **kwargs), fullgraph=True, backend="aot_eager")
    with mla_suite.emulate("gfx942"):
        compiled(q)
        with mla_suite.check(on_difference="raise"):
            with pytest.raises(WrongResult, match="decode ran as native"):
                compiled(q)
            with pytest.raises(WrongResult, match=r"lse at \[|out at \["):
                torch.ops.mla_suite.decode.out(q, *rest, **kwargs, plus_inf_lse=True, out=out, lse=lse)
            with pytest.raises(WrongResult):
                torch.ops.mla_suite.decode(q, *rest, **kwargs)
            with mla_suite.check(0):
                mla_suite.decode(q, *rest, **kwargs)


def test_a_drop_in_function_is_checked_warm_and_replays_its_strides(plant, reports, folder):
    (q, cache, seq_lens, block_table, *_), _ = decode_sample((130, 40), heads=16, q_len=2).make(CPU)
    metadata, num_splits = get_mla_metadata()

    def call() -> None:
        given = q, cache.unsqueeze(2), block_table, seq_lens, 512, metadata, num_splits
        flash_mla_with_kvcache(*given, causal=True)

    with mla_suite.emulate("gfx942"):
        for _ in range(3):
            call()
        with mla_suite.check():
            call()
            assert reports() == []
            plant("decode", *MASK)
            call()
    assert [report for report in reports() if report.startswith("decode ran as native")]
    assert_replays(folder, plant)


def test_max_logits_is_checked_and_replays(plant, folder):
    plant("sparse_decode", *FAULTS["sparse_decode"][1])
    args, kwargs = register.get("sparse_decode").samples()[2].make(CPU)
    args = [*args[:3], [None], *args[4:]]
    wrong = pytest.raises(WrongResult, match=r"sparse_decode.max_logits ran as native")
    with mla_suite.emulate("gfx942"), mla_suite.check(on_difference="raise"), wrong:
        torch.ops.mla_suite.sparse_decode.max_logits(*args, **kwargs)
    assert_replays(folder, plant)


SAMPLES = {
    f"{op.name}-{sample.name}": (op.name, sample)
    for op in register.registry().values()
    for sample in op.samples()
    if sample.bytes < 5e6
}


@pytest.mark.parametrize(("arch", "name"), in_turn(ARCHS, SAMPLES))
def test_no_sample_is_reported(name, arch):
    op, sample = SAMPLES[name]
    args, kwargs = sample.make(CPU)
    with mla_suite.emulate(arch), mla_suite.check(on_difference="raise"):
        getattr(torch.ops.mla_suite, op)(*args, **kwargs)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", range(4))
def test_no_random_problem_is_reported(seed, arch):
    """NaN in every row that no sequence owns, absurd page numbers, empty sequences, sinks, descales, ranks."""
    args, kwargs = random_problems.dense(arch, seed)
    with mla_suite.emulate(arch), mla_suite.check(on_difference="raise"):
        torch.ops.mla_suite.decode(*args, **kwargs)
    args, kwargs = random_problems.sparse(arch, seed)
    with mla_suite.emulate(arch), mla_suite.check(on_difference="raise"):
        torch.ops.mla_suite.sparse_decode(*args, **kwargs)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("above", [87.5, 92.0])
@pytest.mark.parametrize("name", ["decode", "sparse_decode", "combine"])
def test_weights_that_are_no_normal_numbers_behind_a_sink_are_not_reported(name, above, arch):
    """Kernels may take them for 0, and out is not always 0 then."""
    op = register.get(name)
    args, kwargs = op.samples()[0].make(CPU)
    sink, call = op.functional.arguments.index("attn_sink"), getattr(torch.ops.mla_suite, name)
    _, lse = call(*args, **kwargs)
    args = (*args[:sink], lse.flatten(0, -2).amax(0) + above, *args[sink + 1 :])
    with mla_suite.emulate(arch), mla_suite.check(on_difference="raise"):
        call(*args, **kwargs)


@pytest.mark.parametrize("arch", ARCHS)
def test_scores_that_fp32_cannot_hold_are_not_reported(arch):
    """Their products cancel, so that a score is what rounding leaves, times a large scale."""
    half, other = torch.randn(2, 1, 16, 288).bfloat16(), torch.randn(2, 64, 288).bfloat16()
    q, cache = torch.cat((half, half), -1), torch.cat((other, -other), -1)
    lens, table = torch.tensor([1, 9], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    picks = torch.tensor([[[0, -1]], [[64, 70]]], dtype=torch.int32)
    with mla_suite.emulate(arch), mla_suite.check(on_difference="raise"):
        _, lse = mla_suite.decode(q, cache, lens, table, softmax_scale=1e4)
        assert lse[0].abs().max() > 1e-3  # or the test would show nothing
        mla_suite.sparse_decode(q, [cache], [picks], kv_formats=["bf16"], softmax_scale=1e4)


@pytest.mark.parametrize("bound", [{"max_seqlen_kv": 1001}, {"max_seqlen_kv": 500, "split_size": 64}], ids=str)
def test_a_bound_that_a_plan_rounds_is_not_reported(bound):
    """1001 counts as 1008, and 500 keys in splits of 64 as 512; the plan's header says so."""
    with mla_suite.emulate("gfx942"), mla_suite.check(on_difference="raise"):
        mla_suite.plan(torch.tensor([500, 12], dtype=torch.int32), num_heads=16, **bound)


def test_only_the_context_that_switched_it_on_is_checked(plant, problem, reports):
    args, kwargs = problem
    plant("decode", *MASK)

    def decode() -> None:
        with mla_suite.emulate("gfx942"):
            mla_suite.decode(*args, **kwargs)

    with mla_suite.check():
        thread = threading.Thread(target=decode)
        thread.start()
        thread.join()
    assert reports() == []
    assert check_mode.checking() is None


PROGRAM = """
import threading
import torch, mla_suite
from mla_suite.build.manifest import KernelEntry
from mla_suite.ops.decode.samples import decode_sample
usual = KernelEntry.read_text
KernelEntry.read_text = lambda self: usual(self).replace("v_cmp_lt_u32_e32 vcc, v", "v_cmp_ge_u32_e32 vcc, v")
args, kwargs = decode_sample((130, 40), heads=16, q_len=2, num_splits=1).make(torch.device("cpu"))
def decode():
    for _ in range(5):
        mla_suite.decode(*args, **kwargs)
threads = [threading.Thread(target=decode) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with mla_suite.check(0):
    decode()
"""


def test_the_environment_switches_it_on_for_all_threads(folder):
    """15 calls of three threads, which are counted together: calls 1, 6 and 11 are checked."""
    env = os.environ | {"MLA_SUITE_CHECK": "5", "MLA_SUITE_CHECK_DIR": str(folder), "MLA_SUITE_EMULATE": "gfx942"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("decode ran as native") == 3
    assert len(list(folder.glob("*.pt"))) == 3


def test_a_wrong_value_of_the_variable_has_a_warning(caplog):
    for wrong in ("often", "\u0665", "-5"):  # an Arabic five
        assert checks.every("MLA_SUITE_CHECK", wrong) == 0
        assert f"MLA_SUITE_CHECK is '{wrong}', which has no effect; it takes a whole number n" in caplog.text
        caplog.clear()
    assert [checks.every("MLA_SUITE_CHECK", value) for value in ("", "0", "100", "007")] == [0, 0, 100, 7]
    assert not caplog.text


@pytest.mark.parametrize("given", [{"every": -1}, {"every": 0.5}, {"on_difference": "shout"}])
def test_wrong_arguments_are_one_sentence(given):
    with pytest.raises(ValueError, match=r"^check: \w+ is .*; it takes "), mla_suite.check(**given):
        pass


def test_n_may_be_a_number_of_numpy():
    with mla_suite.check(np.int64(3)):
        checking = check_mode.checking()
        assert [checking.due("decode") for _ in range(5)] == [True, False, False, True, False]


def test_debug_and_check_mode_leave_each_other_as_they_are():
    with mla_suite.debug(), mla_suite.check(3):
        now = check_mode.checking()
        assert checks.debugging()
        with mla_suite.debug(False):
            assert not checks.debugging()
            assert check_mode.checking() is now
            with mla_suite.check(0):
                assert check_mode.checking() is None


def test_a_call_that_cannot_be_checked_says_so_once(reports, monkeypatch):
    """A GPU's tensor is stood in for: this machine may have none."""
    dispatch.clear_caches()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = check_mode.Call(register.get("decode"), (), (SimpleNamespace(is_cuda=True),), ())
    for _ in range(2):
        check_mode.run(call, "raise")
    (said,) = reports()
    assert said.startswith("a call of decode is not checked: a CUDA graph captures it: run the model without graphs")


def test_a_reference_that_runs_out_of_memory_says_so(problem, reports, monkeypatch):
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    dispatch.clear_caches()
    monkeypatch.setattr(check_mode, "difference", fails)
    args, kwargs = problem
    with mla_suite.emulate("gfx942"), mla_suite.check(on_difference="raise"):
        mla_suite.decode(*args, **kwargs)
    (said,) = reports()
    assert said == "a call of decode is not checked: the reference needs more memory than is free: no room"


def test_values_that_a_gpu_does_not_look_at_are_not_given_to_the_reference(problem, reports):
    (q, cache, seq_lens, block_table, *rest), kwargs = problem
    op = register.get("decode")
    options = tuple((op.out.options | kwargs).values())
    call = check_mode.Call(op, (), (q, cache, seq_lens, block_table + 100, *rest), options)
    with mla_suite.emulate("gfx942"):
        check_mode.run(call, "raise")
    (said,) = reports()
    assert "a call of decode is not checked: its arguments are not right: decode: block_table[0, 0] is page 1" in said
