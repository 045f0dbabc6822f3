"""A real vLLM engine decodes through our backend: `tox -e vllm`.

The model is a tiny DeepSeek-V3 in fp32 on a CPU. Its greedy tokens must equal those of vLLM's own MLA for CPUs and of
transformers. Every test counts what reached our decode, since an engine that falls back silently would pass as well.

Speculation comes last: it imports numba, after which vLLM 0.32 cannot start another engine in the same process.
"""

import json
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import installed_plugins
import pytest
import tiny_deepseek
import torch
import vllm_cpu
import vllm_engine_plugin
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.worker.utils import select_common_block_size

import mla_suite
from mla_suite.integrations import vllm as integration
from mla_suite.integrations import vllm_step
from mla_suite.models.config import LATENT
from mla_suite.ops.plan.metadata import Plan, Word

LENGTHS = [5, 40, 17, 33]
LATE = [7, 3]  # of prompts that arrive while others decode
LAYERS = tiny_deepseek.LAYERS
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, tiny_deepseek.save_model(folder)


def repeating():
    """Prompts in which drafts are found, and one in which they are not."""
    return [tiny_deepseek.prompts([6], seed=3)[0] * 5, tiny_deepseek.prompts([20], seed=4)[0]]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Tokens and log-probabilities of vLLM's own MLA for CPUs; transformers gives the same tokens."""
    folder, model = checkpoint
    batch = tiny_deepseek.prompts(LENGTHS) + tiny_deepseek.prompts(LATE, seed=9) + repeating()
    with vllm_cpu.engine(folder, ours=False) as llm:
        tokens, logprobs = vllm_cpu.generate(llm, batch)
    for prompt, answer in zip(batch, tokens, strict=True):
        assert tiny_deepseek.greedy(model, prompt) == answer
    return tokens, logprobs


@pytest.fixture
def calls(monkeypatch):
    """(query tokens of each sequence, whether they came packed) of every call that reached our decode."""
    seen = []
    forward = integration.MLASuiteImpl.forward_mqa

    def counted(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        decode, count = attn_metadata.decode, attn_metadata.num_decodes
        starts = attn_metadata.query_start_loc[: count + 1]
        seen.append((starts.diff().tolist(), decode.cu_seqlens_q is not None))
        out, lse = forward(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
        tokens = sum(part.shape[0] for part in q[:1]) if isinstance(q, tuple) else q.shape[0]
        assert out.shape == (tokens, self.num_heads, LATENT)
        assert lse.shape == (tokens, self.num_heads)
        return out, lse

    monkeypatch.setattr(integration.MLASuiteImpl, "forward_mqa", counted)
    return seen


def assert_same(found, expected):
    count = len(found[0])
    assert found[0] == expected[0][:count]
    torch.testing.assert_close(found[1], expected[1][:count], rtol=0, atol=1e-4)


class TestOneEngine:
    """Tests that share an engine, since starting one takes most of a test's time."""

    @pytest.fixture(scope="class")
    def llm(self, checkpoint, expected):
        """As on a GPU where prompts of up to 32 tokens behind cached ones gain by absorbed weights."""
        prompts_gain = mock.patch.object(integration, "absorbed_prompt", return_value=32)
        with prompts_gain, vllm_cpu.engine(checkpoint[0], ours=True, chunks=tiny_deepseek.MAX_LEN) as llm:
            yield llm

    def test_mixed_prompts(self, llm, expected, calls, monkeypatch):
        """Prompts of 5 to 40 tokens at once, then again with two more that arrive while the others decode."""
        batch, late = tiny_deepseek.prompts(LENGTHS), tiny_deepseek.prompts(LATE, seed=9)
        plan, plans = integration.mla_suite.plan, []
        monkeypatch.setattr(integration.mla_suite, "plan", lambda *a, **k: plans.append(plan(*a, **k)) or plans[-1])
        assert_same(vllm_cpu.generate(llm, batch), expected)
        steps = [lens for lens, _ in calls]
        assert len(steps) >= LAYERS * (tiny_deepseek.NEW_TOKENS - 1)
        assert [5] in steps  # prompts of up to 8 tokens are decoded
        assert [1, 1, 1, 1] in steps
        llm.reset_prefix_cache()
        core, finished = llm.llm_engine, {}
        waiting = [(0, ids) for ids in batch] + [(3, late[0]), (5, late[1])]
        for step in range(4 * tiny_deepseek.NEW_TOKENS):
            for name, (when, ids) in enumerate(waiting):
                if when == step:
                    core.add_request(str(name), {"prompt_token_ids": ids}, vllm_cpu.sampling())
            finished.update({done.request_id: done.outputs[0].token_ids for done in core.step() if done.finished})
        answers = [list(finished[name]) for name in sorted(finished, key=lambda name: int(name.split("-")[0]))]
        assert answers == expected[0][: len(waiting)]
        assert any(packed and max(lens) > 1 and min(lens) == 1 for lens, packed in calls)
        assert len(plans) * LAYERS == len(calls)  # one plan serves the layers of a step

    def test_prefix_caching_and_chunked_prefill(self, llm, expected, calls, monkeypatch):
        """Prompts in chunks of 16 tokens; the second time all but their last page comes from the cache."""
        llm.reset_prefix_cache()
        monkeypatch.setattr(llm.llm_engine.engine_core.engine_core.scheduler, "max_num_scheduled_tokens", 16)
        for _ in range(2):
            before = len(calls)
            assert_same(vllm_cpu.generate(llm, tiny_deepseek.prompts(LENGTHS)), expected)
        extends = [lens for lens, _ in calls[before:] if max(lens) > 1]
        assert any(1 in lens and max(lens) > 1 for lens in extends)
        assert any(1 in lens and max(lens) > 8 for lens, _ in calls)  # a prompt that gains, beside decodes

    def test_queries_in_two_tensors(self, llm, expected, monkeypatch):
        """As on a GPU whose kernels read both where vLLM has put them: the rope part in rows of the whole query."""
        decode, given = mla_suite.decode, []
        monkeypatch.setattr(integration, "takes_query_parts", lambda like, heads, q_len: True)
        monkeypatch.setattr(
            mla_suite, "decode", lambda q, *a, **k: given.append((q, k["q_rope"])) or decode(q, *a, **k)
        )
        llm.reset_prefix_cache()
        assert_same(vllm_cpu.generate(llm, tiny_deepseek.prompts(LENGTHS)), expected)
        assert len(given) >= LAYERS * (tiny_deepseek.NEW_TOKENS - 1)
        row = tiny_deepseek.SHAPE["qk_nope_head_dim"] + tiny_deepseek.SHAPE["qk_rope_head_dim"]
        assert {(q.shape[-1], q_rope.stride(-2)) for q, q_rope in given} == {(LATENT, row)}


def test_fp8_cache(checkpoint, calls, monkeypatch):
    """Every row is written in e4m3 at the layer's scale; test_vllm_layers.py compares what decodes make of them.

    From 0.33 on vLLM says of a scale of 1 that it need not be read.
    """
    scale, rows, write = 0.25, 0, integration.MLASuiteImpl.do_kv_cache_update

    def checked_write(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *skip_scale):
        nonlocal rows
        write(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *skip_scale)
        assert skip_scale in ((), (scale == 1,))
        used = slot_mapping.flatten() >= 0
        stored = kv_cache.flatten(0, 1).view(torch.uint8)[slot_mapping.flatten()[used].long()]
        given = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)[used]
        assert torch.equal(stored, (given / scale).to(torch.float8_e4m3fn).view(torch.uint8))
        rows += int(used.sum())

    def set_scale(model):
        for module in model.modules():
            if hasattr(module, "_k_scale"):
                module._k_scale.fill_(scale)
                module._k_scale_float = scale

    monkeypatch.setattr(integration.MLASuiteImpl, "do_kv_cache_update", checked_write)
    batch = tiny_deepseek.prompts(LENGTHS)
    with vllm_cpu.engine(checkpoint[0], ours=True, kv_cache_dtype="fp8") as llm:
        for current in (0.25, 1.0):
            scale = current
            llm.apply_model(set_scale)
            vllm_cpu.generate(llm, batch)
    assert rows >= 2 * LAYERS * (sum(LENGTHS) + len(batch) * (tiny_deepseek.NEW_TOKENS - 1))
    assert len(calls) >= 2 * LAYERS * (tiny_deepseek.NEW_TOKENS - 1)


@pytest.mark.parametrize(
    ("starts", "tokens", "bound", "expected"),
    [
        ([0, 1, 2, 3], 3, 0, (1, True)),
        ([0, 1, 2, 2], 3, 1, (1, True)),  # the last sequence pads a captured batch
        ([0, 1, 1, 2], 3, 1, (1, False)),
        ([0, 4, 8], 8, 4, (4, True)),
        ([0, 4, 8, 8], 12, 4, (4, True)),
        ([0, 4, 6, 6], 12, 4, (4, False)),  # the second has fewer, however the batch is padded
        ([0, 1, 4], 4, 3, (3, False)),
    ],
)
def test_query_lengths_of_a_step(starts, tokens, bound, expected):
    assert vllm_step.query_lengths(torch.tensor(starts, dtype=torch.int32), tokens, bound) == expected


def test_block_sizes():
    backend = integration.MLASuiteBackend
    assert backend.get_preferred_block_size(16) == 64
    assert backend.get_supported_kernel_block_sizes(None) == [MultipleOf(1)]
    assert select_common_block_size(48, [backend]) == 48


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (dict(alibi_slopes=[0.5] * 4), "alibi_slopes is set; choose"),
        (dict(sliding_window=128), "sliding_window is set; choose"),
        (dict(logits_soft_cap=30.0), "logits_soft_cap is set; choose"),
        (dict(sinks=torch.zeros(4)), "sinks is set; choose"),
        (dict(attn_type="encoder"), "attn_type is 'encoder', and it serves decoder self-attention only; choose"),
    ],
)
def test_options_that_it_has_not_are_refused(change, given):
    options = dict(alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None)
    sizes = dict(num_heads=4, head_size=576, scale=0.1, num_kv_heads=1, attn_type="decoder")
    with pytest.raises(NotImplementedError, match=f"MLASuiteImpl: {given} another attention backend"):
        integration.MLASuiteImpl(**{**sizes, **options, **change})


def of_two_processes(tmp_path, folder, batch, **settings):
    """Tokens of an engine that finds the backend by the entry points that this package ships, and what reached our
    decode in each of the two processes that it starts."""
    command = [sys.executable, vllm_engine_plugin.__file__, str(folder), json.dumps(batch), json.dumps(settings)]
    environment = vllm_engine_plugin.environment(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    calls = installed_plugins.calls(tmp_path)
    assert len(calls) == 2
    assert min(len(own) for own in calls) >= LAYERS * (tiny_deepseek.NEW_TOKENS - 1)
    return json.loads(done.stdout.splitlines()[-1]), calls


def test_installed_entry_points_reach_every_process(checkpoint, expected, tmp_path):
    tokens, _ = of_two_processes(tmp_path, checkpoint[0], tiny_deepseek.prompts(LENGTHS))
    assert tokens == expected[0][: len(LENGTHS)]


@pytest.mark.parametrize("interleave", [pytest.param(1, marks=pytest.mark.full), 16])
def test_decode_context_parallelism_verifies_drafts(checkpoint, expected, tmp_path, interleave):
    """Two ranks hold the keys of a sequence in turn and verify drafts of different lengths; one may hold none."""
    parallel = dict(decode_context_parallel_size=2, cp_kv_cache_interleave_size=interleave, block_size=16)
    batch = tiny_deepseek.prompts(LENGTHS) + tiny_deepseek.prompts(LATE, seed=9) + repeating()
    tokens, calls = of_two_processes(tmp_path, checkpoint[0], batch, speculative_config=DRAFTS, **parallel)
    assert tokens == expected[0]
    steps = [row for own in calls for row in own]
    assert {row["ranks"] for row in steps} == {2}
    assert any(len(set(row["query_tokens"])) > 1 for row in steps)
    assert any(min(row["own_keys"]) == 0 for row in steps) == (interleave == 16)


def test_speculation_and_batch_invariance(checkpoint, expected, calls, monkeypatch):
    """Drafts of different lengths leave the tokens as they were, in invariant mode too, whose splits have one size."""
    plans, forward = [], integration.MLASuiteImpl.forward_mqa

    def planned(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        found = forward(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
        decode, heads = attn_metadata.decode, (q[0] if isinstance(q, tuple) else q).shape[-2]
        plans.append(Plan.read(decode.plan).header[Word.SPLIT_SIZE])
        assert plans[-1] == mla_suite.batch_invariant_split_size(heads, decode.max_seqlen_q)
        return found

    with vllm_cpu.engine(checkpoint[0], ours=True, speculative_config=DRAFTS) as llm:
        assert vllm_cpu.generate(llm, tiny_deepseek.prompts(LENGTHS))[0] == expected[0][: len(LENGTHS)]
        assert vllm_cpu.generate(llm, repeating())[0] == expected[0][-2:]
        verified = [lens for lens, _ in calls if max(lens) in (2, 3, 4)]
        assert any(len(set(lens)) > 1 for lens in verified)
        monkeypatch.setattr(integration, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
        monkeypatch.setattr(integration.MLASuiteImpl, "forward_mqa", planned)
        assert vllm_cpu.generate(llm, repeating())[0] == expected[0][-2:]
    assert len(plans) >= LAYERS * (tiny_deepseek.NEW_TOKENS - 1) // 3
