"""vLLM's ROCm entry for sparse decode of DeepSeek V4, called as vLLM's model calls it, against fp64."""

import sys
from types import ModuleType

import pytest
import sparse_problems
import torch
from interface_calls import rocm
from observers import Operators

from mla_suite.integrations import vllm_rocm

TOKENS, HEADS = 3, 16


@pytest.fixture
def arguments():
    given = rocm()
    return given | dict(swa_indices=given["swa_indices"][:, None])  # as vLLM's model has it


def exact(given):
    """The definition in fp64: one softmax over both pools, whose denominator has the sink's exp."""
    pools = [(given["swa_k_cache"], given["swa_indices"], given["swa_lens"])]
    if not given["swa_only"]:
        pools.append((given["kv_cache"], given["topk_indices"], given["topk_lens"]))
    kv_caches, indices, lengths = zip(*pools, strict=True)
    options = dict(kv_formats=["dsv4"] * len(pools), softmax_scale=given["scale"], rounded=False)
    sink = given["attn_sink"][:HEADS]
    return sparse_problems.exact(given["q"], kv_caches, indices, [None] * len(pools), lengths, sink, **options).out


def ragged(indices, lengths):
    rows = [row[: int(count)] for row, count in zip(indices.flatten(1), lengths, strict=True)]
    return torch.cat(rows), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


@pytest.mark.parametrize("swa_only", [False, True], ids=["both pools", "window"])
@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_results_are_the_definitions(arguments, form, swa_only):
    arguments["swa_only"] = swa_only
    if swa_only:
        arguments["kv_cache"] = None
    expected = exact(arguments)
    if form == "ragged":
        for name in ("swa", "topk"):
            pair = ragged(arguments[f"{name}_indices"], arguments[f"{name}_lens"])
            arguments[f"{name}_ragged_indices"], arguments[f"{name}_ragged_indptr"] = pair
            arguments[f"{name}_indices"] = None
    turned = vllm_rocm.rocm_sparse_attn_decode(**arguments, inv_rope_positions=torch.zeros(TOKENS))
    assert turned == 0, "the caller turns every row"
    torch.testing.assert_close(arguments["output"].double(), expected, rtol=2e-2, atol=2e-2)
    assert not arguments["output"][2].any(), "a token without keys"


def test_a_step_without_tokens(arguments):
    per_token = ("q", "topk_indices", "topk_lens", "swa_indices", "swa_lens", "output")
    arguments |= {name: arguments[name][:0] for name in per_token}
    assert vllm_rocm.rocm_sparse_attn_decode(**arguments) == 0


@pytest.mark.parametrize("heads", [HEADS, 64], ids=["own heads", "padded heads"])
def test_results_are_written_into_the_models_buffer(arguments, heads):
    """vLLM passes the decode tokens of a buffer for all tokens, whose heads may be more than the rank's."""
    vllm_rocm.rocm_sparse_attn_decode(**arguments)
    expected = arguments["output"]
    buffer = torch.full((TOKENS + 3, heads, 512), 7.0).bfloat16()
    with Operators() as called:
        vllm_rocm.rocm_sparse_attn_decode(**(arguments | dict(output=buffer[:TOKENS, :HEADS])))
    names = list(map(str, called.seen))
    assert "mla_suite.sparse_decode.out" in names
    assert not any("copy_" in name for name in names), "no result is written twice"
    assert torch.equal(buffer[:TOKENS, :HEADS], expected)
    assert (buffer[TOKENS:] == 7).all()
    assert (buffer[:, HEADS:] == 7).all()


def test_quantised_results_go_through_vllms_own_kernel(arguments, monkeypatch):
    """V4.1 on gfx950 takes e4m3 values and scales; vLLM's kernel, of which a recorder stands here, makes both."""
    vllm_rocm.rocm_sparse_attn_decode(**arguments)
    given = []
    module = ModuleType("vllm.v1.attention.ops.rocm_aiter_mla_sparse")
    module.rocm_inverse_rope_mxfp8_rows = lambda *called: given.append(called)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    turning = dict(inv_rope_positions=torch.arange(TOKENS), inv_rope_cos_sin_cache=torch.randn(9, 64))
    quantised = torch.empty(TOKENS, HEADS * 512), torch.empty(TOKENS, HEADS * 16)
    turned = vllm_rocm.rocm_sparse_attn_decode(**(arguments | dict(output=None)), **turning, output_mxfp8=quantised)
    assert turned == TOKENS, "the caller turns none"
    ((rows, *rest),) = given
    assert torch.equal(rows, arguments["output"])
    assert [id(each) for each in rest] == [id(each) for each in (*turning.values(), 64, *quantised)]
