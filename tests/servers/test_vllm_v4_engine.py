"""DeepSeek V4 in vLLM's offline engine on a CPU, with our attention behind it: `tox -e vllm,vllm33`.

Every call of a layer is compared with vLLM's own operator over the engine's own caches, and greedy tokens with those
that vLLM's operator gives.
"""

import pytest
import torch

if not torch.cpu._is_avx512_bf16_supported():
    # vLLM asks the same question, and loads another library then.
    pytest.skip(
        "vLLM's operators of DeepSeek V4 for CPUs need AVX512_BF16, which this CPU lacks", allow_module_level=True
    )

import vllm_v4_engine as v4_engine

ULP, BOUND = 2**-7, 2**-8  # of bf16, and what vLLM's own operator may be off by
TIE = 0.05
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with v4_engine.engine(tmp_path_factory.mktemp("v4")) as llm:
        yield llm


def prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, v4_engine.VOCAB, (n,), generator=generator).tolist() for n in lengths]


def compare(llm, batch, way):
    """The calls of one of our two ways; it gives the tokens of vLLM's operator up to a near tie, if one turns out."""
    theirs, _ = v4_engine.generate(llm, batch, NEW_TOKENS, "theirs")
    ours, calls = v4_engine.generate(llm, batch, NEW_TOKENS, way)
    for call in calls:
        torch.testing.assert_close(call.ours.double(), call.theirs.double(), rtol=ULP, atol=BOUND)
    assert {call.ratio for call in calls} == set(v4_engine.RATIOS)
    agreed = 0
    for expected, found in zip(theirs, ours, strict=True):
        for (token, distance), (other, _) in zip(expected, found, strict=True):
            if token != other:
                assert distance <= TIE
                break
            agreed += 1
    assert agreed >= len(batch) * NEW_TOKENS // 2
    return calls


def test_our_operator_in_the_place_of_vllms(llm):
    """The longest prompt has more entries than its 4:1 layers select."""
    calls = compare(llm, prompts([5, 140, 2100]), "operator")
    assert {call.ratio for call in calls if call.prompt_tokens >= 2100} == set(v4_engine.RATIOS)
    assert {call.ratio for call in calls if call.decodes == 3} == set(v4_engine.RATIOS)


def test_the_class_behind_the_flag(llm):
    """What MLA_SUITE_DSV4 puts behind a server on CUDA: decode over both pools, prompts over what vLLM gathers."""
    unit, long_unit, other = prompts([6, 30, 9], seed=1)
    calls = compare(llm, [unit * 4, long_unit * 5, other], "class")
    assert {call.ratio for call in calls if call.prompt_tokens} == set(v4_engine.RATIOS)
    assert {call.ratio for call in calls if call.decode_tokens > call.decodes} == set(v4_engine.RATIOS), "drafts"
