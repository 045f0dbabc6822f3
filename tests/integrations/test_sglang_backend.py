"""The SGLang backend class on a stand-in for its base class, so that a plain run notices a wrong number.

All else is shown on SGLang's own classes, in tests/servers.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mla_suite
from mla_suite.ops.plan.metadata import Plan, Word

HEADS, LATENT, WIDTH = 8, 512, 576
PAGE = 64


def modules(monkeypatch, contents):
    """Put modules into sys.modules, with their parents."""
    for name, content in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for key, value in content.items():
            setattr(sys.modules[name], key, value)


def fresh(monkeypatch, name):
    """Import a module of ours on what sys.modules has now; it goes with the test."""
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return importlib.import_module(name)


@pytest.fixture
def sglang(monkeypatch):
    class TritonAttnBackend:
        """Keeps the pools of the runner; `forward` sends decode steps to forward_decode."""

        def __init__(self, model_runner, skip_prefill=False, kv_indptr_buf=None):
            self.req_to_token = model_runner.req_to_token_pool.req_to_token
            self.token_to_kv_pool = model_runner.token_to_kv_pool
            self.enable_deterministic = model_runner.deterministic
            self.split_tile_size = 256 if model_runner.deterministic else None
            self.topk, self.num_draft_tokens, self.num_head = 1, None, HEADS

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
            raise AssertionError("ours takes its place")

        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
            raise AssertionError("prompts are not tested here")

        def shared_read_ends(self, fm):
            raise AssertionError("nothing is captured here")

    @dataclass
    class ForwardBatch:
        """A step: what our backend reads of it."""

        forward_mode: Any
        seq_lens: Any
        req_pool_indices: Any
        out_cache_loc: Any
        seq_lens_cpu: Any = None
        extend_seq_lens: Any = None
        extend_seq_lens_cpu: Any = None
        spec_info: Any = None

    mode = SimpleNamespace(is_target_verify=None, is_extend=None, is_decode_or_idle=None)
    contents = {
        "sglang": dict(__version__="0.5.23"),
        "sglang.kernels.ops.attention.flash_attention": dict(flash_attn_varlen_func=None),
        "sglang.kernels.ops.attention.utils": dict(concat_mla_absorb_q_general=None),
        "sglang.kernels.ops.quantization.fp8_kernel": dict(scaled_fp8_quant=None),
        "sglang.srt.models.deepseek_common": dict(attention_backend_handler=None),
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha": dict(resolve_attn_backend=None),
        "sglang.srt.layers.attention.triton_backend": dict(TritonAttnBackend=TritonAttnBackend),
        "sglang.srt.mem_cache.memory_pool": dict(KVWriteLoc=KVWriteLoc, MLATokenToKVPool=Pool),
        "sglang.srt.model_executor.forward_batch_info": dict(ForwardBatch=ForwardBatch, ForwardMode=mode),
    }
    modules(monkeypatch, contents)
    return fresh(monkeypatch, "mla_suite.integrations.sglang")


class KVWriteLoc:
    """That of SGLang 0.5.20 and 0.5.21, which has no `for_batch`: their pools take the bare slots."""


class Pool:
    """A layer's cache as SGLang keeps it: [slots, 1, 576]."""

    kv_cache_dim, kv_lora_rank = WIDTH, LATENT

    def __init__(self, slots, dtype):
        self.rows = torch.randn(slots, 1, WIDTH).to(dtype)

    def get_key_buffer(self, layer_id):
        return self.rows

    def set_kv_buffer(self, layer, loc, k, v):
        self.rows[loc] = k.to(self.rows.dtype)

    def set_mla_kv_buffer(self, layer, loc, k, k_rope):
        self.set_kv_buffer(layer, loc, torch.cat((k, k_rope), dim=-1), None)


def served(sglang, page, pool, req_to_token, *, deterministic=False):
    """The backend of a server with these pools."""
    runner = SimpleNamespace(use_mla_backend=True, page_size=page, token_to_kv_pool=pool, deterministic=deterministic)
    runner.req_to_token_pool = SimpleNamespace(req_to_token=req_to_token)
    return sglang.MLASuiteAttnBackend(runner)


def made(lengths, rows, **mode):
    """A step of requests in these rows of the table, and a layer."""
    batch = SimpleNamespace(seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths))
    batch.req_pool_indices, batch.forward_mode = torch.tensor(rows), SimpleNamespace(**mode)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, head_dim=WIDTH, v_head_dim=LATENT, scaling=0.05)
    layer.logit_cap, layer.k_scale, layer.tp_k_head_num = 0.0, None, 1
    return batch, layer


def assert_attended(out, q, keys):
    """One token's heads, beside torch in fp32."""
    want = torch.softmax(q.float() @ keys.T * 0.05, -1) @ keys[:, :LATENT]
    torch.testing.assert_close(out.view(HEADS, LATENT).float(), want, rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("page", "dtype"), [(64, torch.bfloat16), (1, torch.bfloat16), (16, torch.float8_e4m3fn)])
def test_sglang_steps(sglang, page, dtype, deterministic, monkeypatch):
    """Two tokens of three requests, a step's rows in two parts and in one, its tensors updated in place between them,
    as a server's graph has it."""
    lengths, rows, slots, scale = [300, 9, 64], [4, 0, 2], 1024, 0.5 if dtype.itemsize == 1 else 1.0
    pool, req_to_token = Pool(slots, dtype), torch.zeros(5, 384, dtype=torch.int32)
    free = iter(torch.randperm(slots // page).tolist())
    for row, length in zip(rows, lengths, strict=True):
        for first in range(0, length + 1, page):
            req_to_token[row, first : first + page] = next(free) * page + torch.arange(page, dtype=torch.int32)
    backend = served(sglang, page, pool, req_to_token, deterministic=deterministic)
    asked, decode = [], mla_suite.decode
    monkeypatch.setattr(mla_suite, "decode", lambda *args, **given: asked.append(given) or decode(*args, **given))
    batch, layer = made(lengths, rows, is_target_verify=lambda: False, is_extend=lambda: False)
    batch.out_cache_loc = torch.zeros(3, dtype=torch.int64)
    layer.k_scale = torch.tensor(scale) if dtype.itemsize == 1 else None
    for step in range(2):
        now = [length + step for length in lengths]
        for tensor in (batch.seq_lens, batch.seq_lens_cpu):
            tensor.copy_(torch.tensor(now))
        batch.out_cache_loc.copy_(req_to_token[rows, [length - 1 for length in now]])
        q, k = torch.randn(3, HEADS, WIDTH).bfloat16(), torch.randn(3, 1, WIDTH).bfloat16()
        if step == 0:
            parts = dict(q_rope=q[..., LATENT:], k_rope=k[..., LATENT:])
            out = backend.forward_decode(
                q[..., :LATENT].flatten(1), k[..., :LATENT], k[..., :LATENT], layer, batch, **parts
            )
        else:
            out = backend.forward_decode(q.flatten(1), k, k[..., :LATENT], layer, batch)
        assert out.shape == (3, HEADS * LATENT)
        stored = pool.rows.view(torch.uint8)[batch.out_cache_loc]
        assert torch.equal(stored, (k / scale).to(dtype).view(torch.uint8)), "rows are divided by k_scale"
        for b, (row, length) in enumerate(zip(rows, now, strict=True)):
            own = pool.rows.view(torch.uint8)[req_to_token[row, :length].long(), 0]  # torch 2.9 does not index float8
            assert_attended(out[b], q[b], own.view(dtype).float() * scale)
    assert Plan.read(backend._plan).header[Word.SPLIT_SIZE] == backend._split_size
    assert (backend._split_size > 0) == deterministic
    assert [given["split_size"] for given in asked] == [backend._split_size] * 2


@pytest.mark.parametrize("extends", [False, True], ids=["drafts", "short extends"])
def test_sglang_steps_of_several_query_tokens(sglang, extends):
    """Two drafts of each request, which its length does not count yet, or extends of 1 to 3 tokens, which it does."""
    lengths = [130, 9, 64]
    own = [1, 3, 2] if extends else [2, 2, 2]
    totals = [length + (0 if extends else n) for length, n in zip(lengths, own, strict=True)]
    pool = Pool(9 * PAGE, torch.bfloat16)
    req_to_token = torch.randperm(9).int().view(3, 3, 1).mul(PAGE).add(torch.arange(PAGE).int()).view(3, -1)
    backend = served(sglang, PAGE, pool, req_to_token)
    mode = dict(is_target_verify=lambda: not extends, is_extend=lambda: True, name="EXTEND")
    batch, layer = made(lengths, range(3), **mode)
    batch.spec_info = SimpleNamespace(topk=1)
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(own), own
    q, k = torch.randn(sum(own), HEADS, WIDTH).bfloat16(), torch.randn(sum(own), 1, WIDTH).bfloat16()
    places = [(b, total - n + i) for b, (total, n) in enumerate(zip(totals, own, strict=True)) for i in range(n)]
    batch.out_cache_loc = torch.stack([req_to_token[place] for place in places]).long()
    out = backend.forward_extend(q.flatten(1), k, k[..., :LATENT], layer, batch)
    for token, (b, position) in enumerate(places):
        assert_attended(out[token], q[token], pool.rows[req_to_token[b, : position + 1].long(), 0].float())
