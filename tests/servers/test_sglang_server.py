"""SGLang's own server decodes through our backend on a CPU, and answers over HTTP: `tox -e sglang`.

The model is a tiny DeepSeek-V3 in fp32. Greedy tokens must equal those of transformers. Every test reads the calls that
reached our decode, since a server that falls back silently would pass as well.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import http_server
import installed_plugins
import pytest
import sglang_server
import tiny_deepseek

LENGTHS = [5, 40, 17, 133]
LATE = [7, 3]  # of prompts that wait until one of the first four has ended
LAYERS, NEW_TOKENS = tiny_deepseek.LAYERS, tiny_deepseek.NEW_TOKENS
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
OTHER_PREFILL = {
    "attention_backend": "triton",
    "decode_attention_backend": "mla_suite",
    "speculative_attention_mode": "decode",
}
"""Prompts by a backend of their own, as our plugin has them on H100 and H200."""
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 8,
    "speculative_ngram_max_bfs_breadth": 4,
}
CHAIN = [1, 3, 7, 15, 31, 63, 127, 255]
"""The tree mask of drafts in a chain."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, sglang_server.save_model(folder)


def calls(folder):
    """Returns the calls that reached our decode in the one process that has a model."""
    (rows,) = installed_plugins.calls(folder)
    return rows


def answered(checkpoint, folder, **options):
    """What a server with these options says of each prompt of LENGTHS; the tokens are those of transformers."""
    path, model = checkpoint
    batch = tiny_deepseek.prompts(LENGTHS)
    with sglang_server.server(path, folder, **options) as address:
        tokens, facts = sglang_server.generate(address, batch)
    assert tokens == [tiny_deepseek.greedy(model, prompt) for prompt in batch]
    return facts


def query_tokens(folder):
    return [call["query_tokens"] for call in calls(folder)]


def test_mixed_prompts_chunks_and_cached_prefixes(checkpoint, tmp_path):
    """A prompt of 133 tokens comes in chunks of at most 64; short ones join the decodes of others; then a prefix of 128
    tokens comes from the radix cache."""
    folder, model = checkpoint
    batch = tiny_deepseek.prompts(LENGTHS + LATE)
    expected = [tiny_deepseek.greedy(model, prompt) for prompt in batch]
    options = dict(page_size=16, chunked_prefill_size=64, enable_mixed_chunk=True, served_model_name="tiny")
    with sglang_server.server(folder, tmp_path, **options) as address:
        tokens, facts = sglang_server.generate(address, batch)
        assert tokens == expected
        assert [fact["cached_tokens"] for fact in facts] == [0] * len(batch)
        steps = query_tokens(tmp_path)
        assert len(steps) >= LAYERS * (NEW_TOKENS - 1)
        assert [1, 1, 1, 1] in steps
        assert any(min(step) == 1 and max(step) in LATE for step in steps)
        tokens, facts = sglang_server.generate(address, batch[3:4])
        assert tokens == expected[3:4]
        assert [fact["cached_tokens"] for fact in facts] == [128]
        assert {"query_tokens": [5], "keys": [133], "split_size": 0} in calls(tmp_path)
        ask = partial(http_server.complete, address, max_tokens=NEW_TOKENS)
        with ThreadPoolExecutor(2) as clients:
            assert list(clients.map(ask, batch[:2])) == expected[:2]
        assert ask(batch[2], stream=True) == expected[2]


@pytest.mark.parametrize("options", [{}, OTHER_PREFILL])
def test_eagle_verifies_four_tokens_in_one_decode(checkpoint, tmp_path, options):
    """DeepSeek-V3's own draft layer drafts, by SGLang's Triton backend; some drafts are taken and some are not."""
    rounds = [fact["spec_verify_ct"] for fact in answered(checkpoint, tmp_path, **EAGLE, **options)]
    assert min(rounds) < NEW_TOKENS - 1
    assert max(rounds) > NEW_TOKENS // 4
    steps = query_tokens(tmp_path)
    assert len(steps) >= LAYERS * max(rounds)
    assert {length for step in steps for length in step} == {4}


@pytest.mark.full
def test_two_ranks(checkpoint, tmp_path, monkeypatch):
    """Each of two processes has half of the heads."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{os.cpu_count() - 1}")
    answered(checkpoint, tmp_path, tp_size=2)
    first, second = installed_plugins.calls(tmp_path)
    assert len(first) >= LAYERS * (NEW_TOKENS - 1)
    assert first == second


@pytest.mark.full
def test_deterministic_inference(checkpoint, tmp_path):
    """Decodes have splits of one size, and prefill is SGLang's however short it is."""
    folder, model = checkpoint
    batch = tiny_deepseek.prompts(LENGTHS)
    with sglang_server.server(folder, tmp_path, enable_deterministic_inference=True) as address:
        for cached in (0, 128):
            tokens, facts = sglang_server.generate(address, batch)
            assert tokens == [tiny_deepseek.greedy(model, prompt) for prompt in batch]
            assert facts[-1]["cached_tokens"] == cached
    rows = calls(tmp_path)
    assert {row["split_size"] for row in rows} == {256}
    assert {length for row in rows for length in row["query_tokens"]} == {1}


def trees(folder):
    """Returns the masks of all verifications through our decode, a row for each sequence."""
    return [row for call in calls(folder) for row in call.get("tree", ())]


def test_ngrams_are_verified_as_a_tree(tmp_path):
    """Few words, so that drafts of n-grams branch."""
    model = tiny_deepseek.save_model(tmp_path / "model", **sglang_server.SHAPE, vocab_size=8)
    batch = [[token % 8 for token in prompt] for prompt in tiny_deepseek.prompts([5, 20, 17, 9, 30, 12])]
    expected = [tiny_deepseek.greedy(model, prompt, 40) for prompt in batch]
    with sglang_server.server(tmp_path / "model", tmp_path, skip_tokenizer_init=True, **NGRAM) as address:
        tokens, facts = sglang_server.generate(address, batch, 40)
        assert tokens == expected
    assert max(fact["spec_verify_ct"] for fact in facts) < 39
    verified = trees(tmp_path)
    assert len(verified) >= LAYERS * max(fact["spec_verify_ct"] for fact in facts)
    assert any(row != CHAIN for row in verified)


def test_eagle_verifies_a_tree(checkpoint, tmp_path):
    """SGLang lets a backend of our name have no trees with pages; its check is told another name."""
    options = EAGLE | dict(speculative_eagle_topk=4, speculative_num_draft_tokens=8)
    facts = answered(checkpoint, tmp_path, **options)
    assert min(fact["spec_verify_ct"] for fact in facts) < NEW_TOKENS - 1
    verified = trees(tmp_path)
    assert len(verified) >= LAYERS * max(fact["spec_verify_ct"] for fact in facts)
    assert any(row != CHAIN for row in verified)
