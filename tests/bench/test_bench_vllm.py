"""benchmarks/bench_vllm.py engine reads a step's times from a profile whose times are known."""

import argparse
import os
import sys
import time
from pathlib import Path

import pytest
import vllm_engine
import vllm_model
import vllm_sparse_engine
import vllm_turns

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
    us, plan_us, between, names = vllm_engine.spans(profile(3.0, attention, captured=captured), LAYERS)
    assert (us, plan_us, between) == (25.0, 3.0, 27.0)
    assert len(names.split(", ")) == 3


def test_time_before_the_previous_kernel_ends_is_not_attentions():
    kernels = [("gemm", 0.0, 10.0), ("decode_early", 4.0, 30.0), ("bmm", 31.0, 40.0)]
    assert vllm_engine.spans(kernels, 1)[:3] == (20.0, 0.0, 21.0)


def test_a_row_is_the_median_of_its_runs():
    rows = [
        {"backend": "A", "batch": 1, "context": 2} | dict.fromkeys(vllm_engine.TIMED, us) | {"plan_us": 1.0}
        for us in (3.0, 1.0, 2.0)
    ]
    (row,) = vllm_model.medians(rows, vllm_engine.KEYS, vllm_engine.TIMED).values()
    assert (row["attention_us"], row["tokens_per_s"]) == (2.0, 2.0)
    assert vllm_engine.per_layer_us(row) == 2.0 + 1.0 / 61


def test_tokens_may_differ_at_a_near_tie_alone():
    first = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[1.0, 0.01, 1.0], [1.0, 1.0, 1.0]]}
    found = {"tokens": [[1, 9, 9], [4, 5, 6]]}
    assert vllm_model.equal_tokens(found, first) == "4 greedy tokens equal, 1 of 2 sequences end at a near tie"
    with pytest.raises(AssertionError, match="a greedy token differs where the best two are 1.00 apart"):
        vllm_model.equal_tokens({"tokens": [[1, 2, 3], [4, 5, 7]]}, first)


ENGINE = """
import sys, vllm_turns

backend, rounds = sys.argv[sys.argv.index("--alone") + 1], 0


def check():
    print("a line that goes through")
    return {"compared": 1, "error": 0.0, "tokens": [[1, 2 if backend == "A" else 3]], "gaps": [[1.0, 1.0]]}


def start(batch, context):
    global rounds
    rounds = 0
    return {"prompts": batch}


def one_round():
    global rounds
    rounds += 1
    return {"tokens_per_s": 10.0 * rounds}


answers = {"check": check, "start": start, "round": one_round, "profile": lambda batch: {"step_us": batch * 1e4}}
raise SystemExit(vllm_turns.serve({"seconds": 1, "page": 64}, answers))
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Programs that stand for engines A and B, which do not give the same tokens."""
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PYTHONPATH", str(Path(vllm_turns.__file__).parent), prepend=os.pathsep)
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
    monkeypatch.setattr(vllm_sparse_engine, "ON_GPU", True)
    parser = argparse.ArgumentParser()
    vllm_sparse_engine.add_arguments(parser)
    options = parser.parse_args(["--model", model, "--backends", "A,B", "--check-alone"])
    if model == "v4":
        assert vllm_sparse_engine.main(options) == 0
        return
    with pytest.raises(AssertionError, match="a greedy token differs where the best two are 1.00 apart"):
        vllm_sparse_engine.main(options)
