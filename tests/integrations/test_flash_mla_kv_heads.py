"""FlashMLA's dense calls with several KV heads, which its own tests have: each shares the query heads that follow each
other, against the definition of one head at a time."""

import pytest
import torch
from built import require_built
from flash_mla_calls import Dense, check

import mla_suite
from mla_suite.integrations import flash_mla_kv_heads


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_machine_code_takes_what_the_cache_becomes(arch):
    """Pages of one token are native: the emulator runs the kernel that dispatch names."""
    require_built(arch)
    problem = Dense([70, 0, 33], 16, kv_heads=2)
    q = problem.queries(2)
    queries, cache, table, lens = flash_mla_kv_heads.split("a call", q, problem.cache, problem.table, problem.lens)
    with mla_suite.emulate(arch):
        chosen = mla_suite.explain("decode", queries, cache.squeeze(2), lens, table, softmax_scale=576**-0.5)
        out, lse = problem.call(q, causal=True)
    assert chosen.backend == "native"
    expected_out, expected_lse = problem.expected(q, True)
    # The kernel rounds its probabilities to bf16, too: 2^-8 of what they weigh, beside half an ulp of the result.
    torch.testing.assert_close(out.float(), expected_out, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_the_cache_and_single_query_tokens_are_not_copied():
    given = Dense([40, 7], kv_heads=4)
    q = given.queries(1, 8)
    problem = flash_mla_kv_heads.split("a call", q, given.cache, given.table, given.lens)
    assert problem.k_cache.data_ptr() == given.cache.data_ptr()
    assert problem.q.data_ptr() == q.data_ptr()
    out, lse = torch.empty(8, 1, 2, 512), torch.empty(8, 2, 1)
    joined = flash_mla_kv_heads.join(out, lse, 4)
    assert [tensor.data_ptr() for tensor in joined] == [out.data_ptr(), lse.data_ptr()]


def test_a_descale_of_queries_counts():
    problem = Dense([40, 7], kv_heads=2)
    q = problem.queries(1, 8)
    check(*problem.call(q, descale_q=torch.tensor([0.5])), problem.expected(q * 0.5))
