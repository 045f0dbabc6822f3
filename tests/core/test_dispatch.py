"""Choosing a backend and saying why, and when values are checked before it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import mla_suite
from mla_suite.core import checks, dispatch, register
from mla_suite.core.dispatch import Backend, Supported, Unsupported
from mla_suite.ops.decode.samples import decode_sample


@pytest.fixture(autouse=True)
def fresh():
    dispatch.clear_caches()
    yield
    dispatch.clear_caches()


def backend(name, answer, asked=None, devices=("cpu", "cuda")):
    def supports(problem, arch):
        if asked is not None:
            asked.append(problem)
        return answer

    return Backend(name, supports, lambda config, outputs, args: lambda outputs, tensors: None, devices)


def test_first_supported_wins_and_reasons_are_kept():
    backends = (
        backend("native", Unsupported("page 48; it takes 64")),
        backend("triton", Supported("config", "rule")),
        backend("reference", Supported(None, "always")),
    )
    choice = dispatch.choose("an_op", backends, ("problem",), None, "cpu")
    assert (choice.backend.name, choice.supported.config) == ("triton", "config")
    assert choice.refused == (("native", "page 48; it takes 64"),)
    assert str(choice) == "triton: rule\n  not native: page 48; it takes 64"


def test_the_reference_on_a_gpu_is_an_error_unless_it_is_allowed(monkeypatch):
    backends = (backend("native", Unsupported("page 48; it takes 64")), backend("reference", Supported(None, "always")))
    choice = dispatch.choose("an_op", backends, 1, None, "cpu")
    ran = []
    run = register._if_allowed("an_op", choice, lambda outputs, args: ran.append(args))
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(
        RuntimeError, match=r"an_op: no kernel takes this call on a GPU \(not native: page 48; it takes 64"
    ):
        run((), (1,))
    with mla_suite.allow_reference():
        run((), (2,))
        capturing = True
        with pytest.raises(RuntimeError, match="an_op: a CUDA graph cannot hold the fp32 reference.* page 48; it"):
            run((), (3,))
    assert ran == [(2,)]


def test_triton_in_place_of_a_kernel_that_was_not_built_is_told_of_once(caplog):
    missing = Unsupported(f"kernel k is not built for an_arch; {dispatch.HOW_TO_BUILD}")
    for native, problem in ((Unsupported("page 48; it takes 64"), 1), (missing, 2), (missing, 3)):
        backends = (backend("native", native), backend("triton", Supported(None, "rule")))
        dispatch.choose("an_op", backends, problem, None, "cuda")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert (
        "an_op runs in Triton, which is slower than the kernel that it stands in for: kernel k" in record.getMessage()
    )


def test_a_backend_of_another_device_is_not_asked():
    asked: list[object] = []
    backends = (
        backend("triton", Supported(None, "rule"), asked, ("cuda",)),
        backend("reference", Supported(None, "always")),
    )
    choice = dispatch.choose("an_op", backends, 1, None, "cpu")
    assert (choice.backend.name, asked) == ("reference", [])
    assert choice.refused == (("triton", "needs cuda tensors, got cpu"),)
    assert dispatch.choose("an_op", backends, 1, None, "cuda").backend.name == "triton"


def test_no_backend_is_one_sentence_with_every_reason():
    backends = (backend("native", Unsupported("not built")), backend("triton", Unsupported("no triton")))
    with pytest.raises(RuntimeError, match=r"an_op: no backend .* on cpu \(native: not built; triton: no triton\)"):
        dispatch.choose("an_op", backends, 0, None, "cpu")


def arguments(**options):
    args, kwargs = decode_sample([130, 64], page=32, **options).make(torch.device("cpu"))
    return args, kwargs


@pytest.mark.parametrize(
    ("options", "given", "note"),
    [
        ({}, {}, "context 160 keys per sequence, from block_table width x page_size"),
        ({"ragged_pages": True}, {}, "context 128 keys per sequence, from kv_indices per sequence x page_size"),
        ({}, {"max_seqlen_kv": 4000}, "context 4000 keys per sequence, from max_seqlen_kv"),
        ({"split_size": 64}, {"max_seqlen_kv": 4000}, "batch-invariant (split_size 64): the choice sees neither"),
    ],
)
def test_explain_says_which_context_decided(options, given, note):
    args, kwargs = arguments(**options)
    explanation = mla_suite.explain("decode", *args, **(kwargs | given))
    assert explanation.backend == "reference"
    assert any(line.startswith(note) for line in explanation.notes)
    assert str(explanation).splitlines()[0] == f"decode on cpu -> reference: {explanation.reason}"


def test_batch_invariant_choice_does_not_depend_on_batch_or_length():
    problems = set()
    for lens in ([1], [5000, 7], [64] * 5):
        args, kwargs = decode_sample(lens, split_size=128).make(torch.device("cpu"))
        problems.add(mla_suite.explain("decode", *args, **kwargs).problem)
    assert len(problems) == 1


def test_explain_shows_refusals_and_configuration(monkeypatch):
    table = "measured row ops/decode/tuned/gfx950.csv:7"
    backends = (backend("native", Unsupported("not built")), backend("triton", Supported({"tile": 64}, table)))
    record = dataclasses.replace(register.get("decode"), backends=backends)
    monkeypatch.setitem(register._registry, "decode", record)
    args, kwargs = arguments()
    assert str(mla_suite.explain("decode", *args, **kwargs)).splitlines()[:3] == [
        f"decode on cpu -> triton: {table}",
        "  config: {'tile': 64}",
        "  not native: not built",
    ]


def test_explain_takes_arguments_as_the_function_does():
    args, kwargs = arguments()
    named = dict(zip(register.get("decode").functional.arguments, args, strict=False))
    assert (
        mla_suite.explain("decode", **kwargs, **named).problem == mla_suite.explain("decode", *args, **kwargs).problem
    )
    cache, chosen = torch.zeros(2, 16, 576), torch.zeros(3, 5, dtype=torch.int32)  # no list of what is optional
    answer = mla_suite.explain(
        "sparse_decode", torch.zeros(3, 4, 576), [cache], [chosen], kv_formats=["fp32"], softmax_scale=1.0
    )
    assert answer.backend == "reference"


def test_choices_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_CACHED", 3)
    asked = []
    backends = [backend("reference", Supported(None, "any"), asked)]
    for problem in (1, 2, 3, 3, 4, 1):
        dispatch.choose("op", backends, problem, None, "cpu")
        assert len(dispatch._choices) <= 3
    assert asked == [1, 2, 3, 4, 1]


def test_explain_refuses_what_the_operator_refuses():
    args, kwargs = arguments()
    with pytest.raises(TypeError, match="decode: seq_lens is int64; it takes int32"):
        mla_suite.explain("decode", *args[:2], args[2].long(), *args[3:], **kwargs)
    with pytest.raises(
        TypeError, match="explain: decode: missing a required argument: 'seq_lens'; give the arguments of"
    ):
        mla_suite.explain("decode", *args[:2], **kwargs)
    with pytest.raises(ValueError, match="no operator 'prefill'"):
        mla_suite.explain("prefill")


def test_log_prints_each_choice_once():
    code = """
import torch, mla_suite
for _ in range(3):
    mla_suite.plan(torch.tensor([5], dtype=torch.int32), num_heads=16, num_sm_parts=2, max_seqlen_kv=8)
"""
    environment = os.environ | {"MLA_SUITE_LOG": "dispatch", "MLA_SUITE_DEBUG": "yes"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[0] == "MLA_SUITE_DEBUG is 'yes', which has no effect; it takes 1"
    assert done.stderr.count("plan Problem(") == 1
    assert "-> reference: " in done.stderr


def test_only_the_calls_of_ones_own_thread_are_counted():
    partials, lens = (torch.randn(6, 4, 128), torch.randn(6, 4)), torch.tensor([5, 7]).int()
    entered, left = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    compiled = torch.compile(
        lambda out, lse: mla_suite.combine(out, lse, num_splits=3)[0] + 1, fullgraph=True, backend="aot_eager"
    )
    compiled(*partials)

    def planning():
        with dispatch.count_calls() as calls:
            entered.wait()
            for _ in range(3):
                mla_suite.plan(lens, num_heads=16)
            left.wait()
        mla_suite.plan(lens, num_heads=16)
        return calls

    def combining():
        with dispatch.count_calls() as outer:
            mla_suite.combine(*partials, num_splits=3)
            with dispatch.count_calls() as calls:
                entered.wait()
                for call in (mla_suite.combine, torch.ops.mla_suite.combine):
                    call(*partials, num_splits=3)
                for _ in range(2):
                    compiled(*partials)
                left.wait()
        return outer, calls

    mla_suite.plan(lens, num_heads=16)
    with ThreadPoolExecutor(2) as pool:
        planned, combined = pool.submit(planning), pool.submit(combining)
        assert planned.result() == {("plan", "reference", "None"): 3}
        assert combined.result() == ({("combine", "reference", "None"): 1}, {("combine", "reference", "None"): 4})


def test_triton_launches_on_the_tensors_device(monkeypatch):
    """Which need not be the current one; Triton asks for that."""
    entered, ran = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        entered.pop()

    def run(config, outputs, args):
        ran.append((config, args, list(entered)))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setitem(sys.modules, "mla_suite_test_portable", SimpleNamespace(run=run))
    args = register.get("plan").Args(torch.zeros(1), num_heads=1, max_seqlen_q=1, num_sm_parts=1, max_seqlen_kv=1)
    dispatch.triton_backend("mla_suite_test_portable").run("tile", (), args)
    assert [(config, given == args, devices) for config, given, devices in ran] == [("tile", True, [args.seq_lens])]


def test_a_device_pays_for_value_checks_in_debug_mode_alone():
    """Meta stands for a device: what is asked is its type."""
    calls: list[str] = []
    op = dataclasses.replace(register.get("plan"), validate=lambda args: calls.append(args.seq_lens.device.type))
    register._validate(op, (torch.empty(1, device="meta"), None), (1, 1, 1, 0, 0, 0))
    assert calls == []
    register._validate(op, (torch.empty(1), None), (1, 1, 1, 0, 0, 0))
    assert calls == ["cpu"]
    with mla_suite.debug():
        register._validate(op, (torch.empty(1, device="meta"), None), (1, 1, 1, 0, 0, 0))
        with mla_suite.debug(False):
            register._validate(op, (torch.empty(1, device="meta"), None), (1, 1, 1, 0, 0, 0))
    assert calls == ["cpu", "meta"]
    assert not checks.debugging()
