"""benchmarks/bench_vllm.py engine reads a step's times from a profile whose times are known."""

import argparse
import csv
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import definition
import profiles
import pytest
import torch
import vllm_check
import vllm_engine
import vllm_model
import vllm_turns

from mla_suite.testing import exact_decode

LAYERS, STEPS = 3, 4


def profile(plan_us, attention, *, captured):
    """Kernels of steps: a plan in the first layer or before it; attention of 20 us, whose reduction overlaps it by 15
    and ends 5 later, between kernels of 10 and 5 us."""
    kernels, now = [], 0.0

    def run(name, us, gap=1.0):
        nonlocal now
        kernels.append((name, now, now + us))
        now += us + gap

    for _ in range(STEPS):
        if not captured:
            run("smxx::get_mla_metadata_kernel<int>", plan_us)
        for layer in range(LAYERS):
            run("gemm", 10.0)
            if captured and layer == 0:
                run("plan_step_search_waves_5", plan_us, gap=0.0)
            kernels.append((attention, now, now + 20.0))
            kernels.append(("flash_fwd_mla_combine_kernel", now + 5, now + 25.0))
            now += 26.0
            run("bmm", 5.0)
    return kernels


@pytest.mark.parametrize("captured", [True, False])
def test_attention_and_plan_of_a_profile(captured):
    attention = "decode_dtype_bf16" if captured else "void sm90::flash_fwd_splitkv_mla_kernel<T>(P)"
    us, plan_us, between, names = profiles.spans(profile(3.0, attention, captured=captured), LAYERS)
    assert (us, plan_us, between) == (25.0, 3.0, 27.0)
    assert len(names.split(", ")) == 3


def test_time_before_the_previous_kernel_ends_is_not_attentions():
    kernels = [("gemm", 0.0, 10.0), ("decode_early", 4.0, 30.0), ("bmm", 31.0, 40.0)]
    assert profiles.spans(kernels, 1)[:3] == (20.0, 0.0, 21.0)


def test_a_row_is_the_median_of_its_runs():
    rows = [{"backend": "A", "batch": 1, "context": 2, "attention_us": us, "plan_us": 1.0} for us in (3.0, 1.0, 2.0)]
    (row,) = vllm_model.medians(rows, vllm_engine.KEYS, ("attention_us", "plan_us")).values()
    assert row["attention_us"] == 2.0
    assert vllm_engine.per_layer_us(row) == 2.0 + 1.0 / 61


def test_attention_that_selects_keys_is_added_up():
    """What runs beside the kernel before it is not attention's, and two kernels of attention are one span."""
    kernels = [("gemm", 0.0, 10.0), ("decode_kv_v32", 4.0, 30.0), ("combine_rows", 31.0, 33.0), ("bmm", 33.0, 40.0)]
    assert profiles.selecting_us([*kernels, ("decode_kv_v32", 41.0, 45.0)]) == 23.0 + 4.0


def test_tokens_may_differ_at_a_near_tie_alone():
    first = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[1.0, 0.01, 1.0], [1.0, 1.0, 1.0]]}
    found = {"tokens": [[1, 9, 9], [4, 5, 6]]}
    assert vllm_model.equal_tokens(found, first) == "4 greedy tokens equal, 1 of 2 sequences end at a near tie"
    with pytest.raises(AssertionError, match="a greedy token differs where the best two are 1.00 apart"):
        vllm_model.equal_tokens({"tokens": [[1, 2, 3], [4, 5, 7]]}, first)


@pytest.fixture
def engines(turn_engine, monkeypatch):
    """Programs that stand for engines A and B, which do not give the same tokens."""
    monkeypatch.setattr(sys, "argv", [turn_engine])
    return argparse.Namespace(backends="A,B", batches=(1, 8), contexts=(64,), rounds=3, skip_check=False)


def test_engines_take_turns(engines, capfd):
    rows = []
    vllm_turns.run(engines, same_tokens=False, keep=rows.append)
    assert [(row["backend"], row["batch"], row["context"]) for row in rows] == [
        *(("A", 1, 64), ("B", 1, 64), ("A", 8, 64), ("B", 8, 64))
    ]
    rates = [[row[f"{name}tokens_per_s"] for name in ("least_", "", "most_")] for row in rows]
    assert rates == [[10.0, 20.0, 30.0]] * 4
    assert [(row["prompts"], row["step_us"]) for row in rows] == [(1, 1e4)] * 2 + [(8, 8e4)] * 2
    assert {round(vllm_turns.gpu_share(row), 6) for row in rows} == {0.2}
    assert capfd.readouterr().out.count("a line that goes through") == 2


def test_engines_share_a_core_and_stop_while_they_wait(engines):
    engine = vllm_turns.Engine("A")
    try:
        engine.started()
        assert os.sched_getaffinity(engine._process.pid) == {max(os.sched_getaffinity(0))}
        state = Path(f"/proc/{engine._process.pid}/stat")
        for _ in range(100):
            if state.read_text().rsplit(")")[-1].split()[0] == "T":
                break
            time.sleep(0.02)
        else:
            pytest.fail("the engine runs while nobody asks it")
        assert engine.ask("round") == {"tokens_per_s": 10.0}
    finally:
        engine.end()


def test_an_engine_that_fails_ends_the_program_with_its_name(engines):
    engine = vllm_turns.Engine("A")
    engine.started()
    with pytest.raises(SystemExit, match="the engine with A ended with status 1"):
        engine.ask("unknown")
    engine.end()


@pytest.mark.parametrize("model", ["v32", "v4"])
def test_tokens_of_two_backends_are_compared_but_for_v4s(model, engines, monkeypatch):
    monkeypatch.setattr(vllm_engine, "ON_GPU", True)
    parser = argparse.ArgumentParser()
    vllm_engine.add_arguments(parser)
    options = parser.parse_args(["--model", model, "--backends", "A,B", "--check-alone"])
    if model == "v4":
        assert vllm_engine.main(options) == 0
        return
    with pytest.raises(AssertionError, match="a greedy token differs where the best two are 1.00 apart"):
        vllm_engine.main(options)


def test_ratios_are_of_the_first_backends_times(engines, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_engine, "ON_GPU", True)
    parser, saved = argparse.ArgumentParser(), tmp_path / "rows.csv"
    vllm_engine.add_arguments(parser)
    given = ["--model", "v4", "--backends", "A,B", "--batches", "1,8", "--skip-check", "--csv", str(saved)]
    assert vllm_engine.main(parser.parse_args(given)) == 0
    rows = list(csv.DictReader(saved.read_text().splitlines()))
    assert [(row["backend"], row["batch"], row["ratio"], row["step_ratio"], row["gpu"]) for row in rows] == [
        *(("A", "1", "1", "1", "0.3"), ("B", "1", "0.5", "1", "0.3")),
        *(("A", "8", "1", "1", "0.3"), ("B", "8", "0.5", "1", "0.3")),
    ]
    facts = {(row["model"], row["kv_cache_dtype"], row["heads"], row["layers"]) for row in rows}
    assert facts == {("v4", "fp8", "64", "8")}


SCALE = 0.05


def layer(factor, split):
    """A layer of an engine whose attention is the definition's, but for a factor."""

    def forward(q, cache, metadata, module):
        keys = cache.flatten(0, 1)[: split.step.seq_lens[0]]
        return factor * definition.attended(q, keys, SCALE), None

    return argparse.Namespace(impl=argparse.Namespace(scale=SCALE, forward_mqa=forward))


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_an_engines_attention_is_compared_with_its_definition(factor):
    lens, starts = torch.tensor([70]), torch.tensor([0, 2])
    step = argparse.Namespace(seq_lens=lens, query_start_loc_cpu=starts, block_table_tensor=torch.tensor([[0, 1]]))
    split = argparse.Namespace(step=step)
    layers = [layer(factor, split), layer(1.0, split)]
    llm = argparse.Namespace(collective_rpc=lambda function: [layers])
    q, cache = torch.randn(2, 4, 576), torch.randn(2, 64, 576)
    wrong = pytest.raises(AssertionError, match="attention differs from its definition by 2.0e-02 in 2 comparisons")
    with nullcontext() if factor == 1.0 else wrong, vllm_check.watched(llm, "v3", split) as errors:
        for each in layers:
            each.impl.forward_mqa(q, cache, argparse.Namespace(num_decodes=1), None)
    assert [round(error, 3) for _, error in errors] == [round(factor - 1, 3), 0.0]


@pytest.mark.parametrize("sink", [None, torch.tensor([-1.0, 2.0])])
def test_the_definition_is_exact_attention(sink):
    q, keys = torch.randn(3, 2, 576).bfloat16(), torch.randn(10, 576).bfloat16()
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([10], dtype=torch.int32)
    exact = exact_decode(q[None], keys[None], lens, table, softmax_scale=SCALE, attn_sink=sink)
    assert torch.allclose(definition.attended(q, keys, SCALE, sink).double(), exact.out[0], atol=1e-5)
