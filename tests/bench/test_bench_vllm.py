"""benchmarks/bench_vllm.py engine reads a step's times from a profile whose times are known."""

import argparse

import pytest
import vllm_engine
import vllm_model
import vllm_sparse_engine

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


@pytest.mark.parametrize("model", ["v32", "v4"])
def test_tokens_of_two_backends_are_compared_but_for_v4s(model, monkeypatch):
    tokens = iter([[[1, 2]], [[1, 3]]])
    monkeypatch.setattr(vllm_sparse_engine, "ON_GPU", True)
    monkeypatch.setattr(vllm_engine, "run_process", lambda *_: ({"tokens": next(tokens), "gaps": [[1.0, 1.0]]}, 0))
    parser = argparse.ArgumentParser()
    vllm_sparse_engine.add_arguments(parser)
    options = parser.parse_args(["--model", model, "--backends", "A,B"])
    if model == "v4":
        assert vllm_sparse_engine.main(options) == 0
        return
    with pytest.raises(AssertionError, match="a greedy token differs where the best two are 1.00 apart"):
        vllm_sparse_engine.main(options)
