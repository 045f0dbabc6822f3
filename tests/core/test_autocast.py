"""The reference computes in fp32 under autocast too, and whatever precision torch's matrix products are allowed."""

from threading import Event, Thread

import pytest
import torch

import mla_suite
from mla_suite.core import dispatch
from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd


def decode(q, rows, picks):
    seq_lens = torch.tensor([20, 1], dtype=torch.int32)
    block_table = torch.tensor([[5, 3], [2, 0]], dtype=torch.int32)
    return mla_suite.decode(q, rows, seq_lens, block_table, softmax_scale=0.1)


def sparse_decode(q, rows, picks):
    return mla_suite.sparse_decode(q, [rows], [picks], kv_formats=["bf16"], softmax_scale=0.1)


def sparse_prefill(q, rows, picks):
    return flash_mla_sparse_fwd(q[:, 0], rows.view(-1, 1, 576), picks, 0.1)


@pytest.mark.parametrize("call", [decode, sparse_decode, sparse_prefill])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_do_not_depend_on_autocast(call, dtype):
    q, rows = torch.randn(2, 1, 16, 576), torch.randn(8, 16, 576).bfloat16()
    picks = torch.randint(128, (2, 1, 40), dtype=torch.int32)
    expected = call(q, rows, picks)
    for _ in range(2):  # the second is of the fast path's metadata
        with torch.autocast("cpu", dtype=dtype):
            results = call(q, rows, picks)
        assert all(map(torch.equal, results, expected))


@pytest.fixture
def settings():
    """What says how torch multiplies fp32 matrices on a GPU and on a CPU, put back behind the test."""
    both = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [each.fp32_precision for each in both]
    yield lambda: [each.fp32_precision for each in both]
    torch.set_float32_matmul_precision("highest")
    for each, value in zip(both, before, strict=True):
        each.fp32_precision = value


@pytest.fixture
def seen(monkeypatch, settings):
    """The settings whenever the reference of decode multiplies."""
    found, multiply = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *given: (found.append(settings()), multiply(*given))[1])
    return found


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_reference_multiplies_in_fp32(precision, seen, settings):
    torch.set_float32_matmul_precision(precision)
    before = settings()
    assert before != ["ieee", "ieee"]
    decode(torch.randn(2, 1, 16, 576), torch.randn(8, 16, 576).bfloat16(), None)
    assert seen == [["ieee", "ieee"]] * 2
    assert settings() == before


def test_a_thread_that_leaves_the_reference_leaves_others_in_fp32(settings):
    """The setting is the process's: threads that overlap must neither lose fp32 nor the caller's setting."""
    torch.set_float32_matmul_precision("high")
    before, products, first, second = settings(), dispatch._fp32_products, Event(), Event()

    def one():
        with products:
            first.set()
            second.wait(10)

    thread = Thread(target=one)
    thread.start()
    first.wait(10)
    with products:
        second.set()
        thread.join()
        assert settings() == ["ieee", "ieee"]
    assert settings() == before
