"""How prompts attend with our backend on SGLang's own forward methods: `tox -e sglang`.

FlashAttention 3 needs a GPU; torch code with its arguments stands for it.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import installed_plugins
import pytest
import sglang_classes as theirs
import sglang_expanded
import sglang_server
import tiny_deepseek
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from test_sglang_classes import LENGTHS, POOL_ROWS, decodes, extend, extends, made, step

import mla_suite
from mla_suite import archs, integrations
from mla_suite.integrations import plugins, sglang_prompts
from mla_suite.integrations import sglang as integration

__all__ = ["decodes", "extends"]  # fixtures
HEADS, WIDTH, WIDTH_V = theirs.HEADS, 192, 128
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ONE_SHOT, CHUNKED, MLA = AttnForwardMethod.MHA_ONE_SHOT, AttnForwardMethod.MHA_CHUNKED_KV, AttnForwardMethod.MLA
MOST = 128 * 1024  # keys that SGLang expands at once


@pytest.fixture
def expanding(monkeypatch):
    """A server as on an H100, over an fp8 cache unless told otherwise, with torch code for FlashAttention 3."""
    monkeypatch.setattr(sglang_prompts, "flash_attn_varlen_func", sglang_expanded.varlen)
    monkeypatch.setattr(integrations, "current_arch", lambda like: archs.get("sm_90"))
    return lambda **changes: made(monkeypatch, **{"dtype": FP8, **changes})


def method(monkeypatch, new, cached, *, prompts=True, mode=ForwardMode.EXTEND, scale=None, captured=False, **settings):
    """The forward method that SGLang's models take for a batch of new tokens behind cached ones."""
    backend = SimpleNamespace(prompts=sglang_prompts.Prompts(192) if prompts else None)
    deterministic = SimpleNamespace(enable_deterministic_inference=settings.pop("deterministic", False))
    monkeypatch.setattr(sglang_prompts, "resolve_attn_backend", lambda batch: backend)
    monkeypatch.setattr(handlers, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))
    monkeypatch.setattr(handlers, "is_in_breakable_cuda_graph", lambda: captured)
    monkeypatch.setattr(handlers, "is_cp_active", lambda batch: False)
    batch = SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=new, extend_prefix_lens_cpu=cached)
    batch.seq_lens_cpu = None if new is None else [sum(lens) for lens in zip(new, cached, strict=True)]
    batch.get_max_chunk_capacity = lambda: MOST
    layer = SimpleNamespace(disable_chunked_prefix_cache=settings.pop("disabled", False), qk_rope_head_dim=64)
    layer.chunked_prefix_cache_threshold = 8192
    layer.attn_mqa = SimpleNamespace(k_scale_float=scale)
    assert not settings
    return handlers.AttentionBackendRegistry.get_handler("mla_suite")(layer, batch)


@pytest.mark.parametrize(
    ("new", "cached", "expected"),
    [
        ([4096], [0], ONE_SHOT),
        ([MOST + 1], [0], CHUNKED),
        ([4096], [4096], ONE_SHOT),  # which SGLang's own backend would attend to absorbed
        ([200], [1000], ONE_SHOT),
        ([64], [16384], MLA),  # which it would expand
        ([8192], [MOST], CHUNKED),
        ([1, 1, 1, 8192], [4096, 4096, 4096, 0], ONE_SHOT),
        ([1] * 100 + [256], [4096] * 100 + [0], MLA),
        (None, None, MLA),
    ],
)
def test_a_prefix_is_expanded_where_that_is_cheaper(monkeypatch, new, cached, expected):
    sglang_prompts.register("mla_suite")
    mode = ForwardMode.DECODE if new is None else ForwardMode.EXTEND
    assert method(monkeypatch, new, cached, mode=mode) is expected


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (MLA, dict(captured=True)),
        (MLA, dict(deterministic=True)),
        (MLA, dict(mode=ForwardMode.TARGET_VERIFY)),
        (MLA, dict(scale=0.5)),
        (ONE_SHOT, dict(scale=1.0)),
        (ONE_SHOT, dict(disabled=True)),
        (AttnForwardMethod.MHA, dict(prompts=False)),
    ],
)
def test_what_else_decides(monkeypatch, expected, changes):
    sglang_prompts.register("mla_suite")
    assert method(monkeypatch, [4096], [0], **changes) is expected
    with_prefix = MLA if changes.keys() & {"disabled", "prompts"} else expected
    assert method(monkeypatch, [4096], [4096], **changes) is with_prefix


def test_sglang_keeps_the_way_to_expand_a_prefix_for_our_name(monkeypatch):
    from sglang.srt import server_args

    plugins.sglang()
    plugins.sglang()
    assert server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count("mla_suite") == 1
    theirs.settings(monkeypatch)
    plugins._sglang_backend(theirs.runner(64, torch.bfloat16))
    assert handlers.AttentionBackendRegistry.get_handler("mla_suite") is sglang_prompts.forward_method


def expanded(new, cached, **changes):
    """(batch, layer, q, k, v) of a prompt whose heads have keys of their own for all tokens, the cached ones too."""
    keys = [q_len + prefix for q_len, prefix in zip(new, cached, strict=True)]
    batch = theirs.batch(ForwardMode.EXTEND, keys, POOL_ROWS, torch.arange(sum(new)), new)
    batch.extend_prefix_lens_cpu = cached
    batch.attn_attend_prefix_cache, batch.mha_one_shot, batch.mha_return_lse = False, True, False
    layer = theirs.layer(0)
    layer.tp_k_head_num = layer.tp_v_head_num = HEADS
    layer.head_dim, layer.v_head_dim = WIDTH, WIDTH_V
    vars(batch).update(changes)
    q = torch.randn(sum(new), HEADS, WIDTH).bfloat16()
    k, v = torch.randn(sum(keys), HEADS, WIDTH).bfloat16(), torch.randn(sum(keys), HEADS, WIDTH_V).bfloat16()
    return batch, layer, q, k, v


def attended(new, cached, layer, q, k, v):
    """Causal attention of each sequence in fp64."""
    results, first, first_k = [], 0, 0
    for q_len, prefix in zip(new, cached, strict=True):
        own = slice(first, first + q_len), slice(first_k, first_k + prefix + q_len)
        scores = torch.einsum("qhd,khd->qhk", q[own[0]].double(), k[own[1]].double()) * layer.scaling
        hidden = torch.arange(prefix + q_len) > torch.arange(q_len)[:, None] + prefix
        weights = torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1)
        results.append(torch.einsum("qhk,khd->qhd", weights, v[own[1]].double()))
        first, first_k = own[0].stop, own[1].stop
    return torch.cat(results)


@pytest.mark.parametrize("cached", [[0, 0, 0], [70, 0, 9]])
def test_expanded_prompts_at_once(expanding, extends, decodes, cached):
    """The second time in a batch that the server uses again: a pass begins with a layer that is further down."""
    backend, _ = expanding()
    held = SimpleNamespace()
    for layer_id, new in ((1, [30, 4, 17]), (0, [9, 40, 2])):
        batch, layer, q, k, v = expanded(new, cached)
        layer.layer_id = layer_id
        vars(held).update(vars(batch))
        out = backend.forward_extend(q, k, v, layer, held, False)
        want = attended(new, cached, layer, q, k, v)
        torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2e-4)
    assert (extends, decodes) == ([], [])


def test_a_prefix_in_chunks(expanding, extends):
    """Each call gives the logarithms with which SGLang merges the new tokens' result and that of each chunk."""
    new, cached, chunk = [30, 4, 17], [70, 0, 100], 64
    batch, layer, q, k, v = expanded(new, cached, mha_one_shot=False, mha_return_lse=True)
    (backend, _), parts = expanding(), []
    first = [sum(new[:b]) + sum(cached[:b]) for b in range(3)]
    tail = torch.cat([torch.arange(first[b] + cached[b], first[b] + cached[b] + new[b]) for b in range(3)])
    parts.append(backend.forward_extend(q, k[tail], v[tail], layer, batch, False))
    lens = [[min(max(prefix - at, 0), chunk) for prefix in cached] for at in (0, chunk)]
    batch.attn_attend_prefix_cache = True
    batch.prefix_chunk_cu_seq_lens = torch.nn.functional.pad(torch.tensor(lens).cumsum(1), (1, 0)).int()
    batch.prefix_chunk_max_seq_lens = [max(own) for own in lens]
    for index, own in enumerate(lens):
        batch.prefix_chunk_idx = index
        rows = torch.cat([torch.arange(first[b] + index * chunk, first[b] + index * chunk + own[b]) for b in range(3)])
        parts.append(backend.forward_extend(q, k[rows], v[rows], layer, batch, False))
    outs, lses = (torch.stack(each).double() for each in zip(*parts, strict=True))
    weights = torch.softmax(lses, 0)[..., None]
    torch.testing.assert_close((outs * weights).sum(0), attended(new, cached, layer, q, k, v), rtol=2**-7, atol=2e-3)
    assert extends == []


def test_scores_of_expanded_prompts_are_plain(expanding):
    batch, layer, q, k, v = expanded([30, 4, 17], [0, 0, 0])
    backend, _ = expanding()
    with pytest.raises(ValueError, match="sinks is given; scores are plain softmax"):
        backend.forward_extend(q, k, v, layer, batch, False, sinks=torch.zeros(HEADS))
    layer.logit_cap = 30.0
    with pytest.raises(ValueError, match="scores are not capped"):
        backend.forward_extend(q, k, v, layer, batch, False)


@pytest.mark.parametrize(("dtype", "k_scale"), [(FP8, 0.25), (BF16, None)])
@pytest.mark.parametrize(("q_lens", "planned"), [([8, 1, 3], True), ([60, 9, 64], False)])
def test_absorbed_prompts_of_any_length(monkeypatch, expanding, decodes, extends, q_lens, planned, dtype, k_scale):
    """Those without a prefix too, as in a captured prompt. Partial results of long ones would take much memory."""
    plans, plan = [], mla_suite.plan
    monkeypatch.setattr(mla_suite, "plan", lambda *args, **options: plans.append(options) or plan(*args, **options))
    made = expanding(dtype=dtype, k_scale=k_scale)
    step(*made, ForwardMode.EXTEND, LENGTHS, q_lens, k_scale, in_two=True)
    assert decodes == [max(q_lens)] * 2
    assert len(plans) == planned
    assert extends == []


@pytest.mark.parametrize(
    ("new", "cached", "heads", "over_fp8", "over_bf16"),
    [
        ([1024], [0], 128, True, True),
        ([512], [2048], 128, True, True),
        ([1024], [2048], 128, False, False),
        ([2000], [0], 128, False, False),
        ([2000], [0], 16, True, True),  # which saves as much as 707 tokens of 128 heads
        ([4096], [0], 16, False, False),
        ([256], [4096], 128, True, True),
        ([264], [16384], 128, False, True),  # a pair of 16-bit rows takes less time
        ([512], [16384], 128, False, False),
        ([64], [16384], 128, True, True),
    ],
)
def test_prompts_that_gain_stay_out_of_graphs(monkeypatch, expanding, new, cached, heads, over_fp8, over_bf16):
    """SGLang's graphs of prompts have absorbed weights; where ranks have batches of their own it asks for a vote."""
    for changes, expected in ((dict(), over_fp8), (dict(dtype=BF16), over_bf16), (dict(deterministic=True), True)):
        monkeypatch.setattr(theirs, "HEADS", heads)
        backend, _ = expanding(**changes)
        batch = SimpleNamespace(extend_seq_lens_cpu=new, extend_prefix_lens_cpu=cached)
        assert backend.can_run_prefill_cuda_graph(batch) is expected
        assert backend.vote_prefill_cuda_graph(SimpleNamespace(extend_lens=new, prefix_lens=cached)) is expected


def test_sglang_asks_by_these_names():
    source = Path(prefill_cuda_graph_runner.__file__).read_text()
    for name in ("can_run_prefill_cuda_graph", "vote_prefill_cuda_graph"):
        assert f'"{name}"' in source
        assert hasattr(integration.MLASuiteAttnBackend, name)
    fields = {field.name for field in dataclasses.fields(ScheduleBatch)}
    assert fields >= {"extend_lens", "prefix_lens"}


def test_without_its_gpu(monkeypatch, expanding):
    monkeypatch.setattr(integrations, "current_arch", lambda like: None)
    assert expanding()[0].prompts is None


@pytest.mark.parametrize(
    ("dtype", "heads", "pairs"),
    [(FP8, 128, 192), (FP8, 16, 192), (BF16, 128, 256), (torch.float16, 64, 256), (BF16, 16, 384)],
)
def test_what_a_cached_key_costs(expanding, dtype, heads, pairs):
    like = torch.empty(0)
    expanding(dtype=dtype)
    assert sglang_prompts.over(dtype, like, 576, heads).pairs == pairs
    assert sglang_prompts.over(torch.float32, like, 576, heads) is None
    assert sglang_prompts.over(dtype, like, 400, heads) is None


@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_deterministic_prompts_stay_with_triton(expanding, decodes, extends, dtype):
    backend, _ = expanding(dtype=dtype, deterministic=True)
    extend(backend, new=(10, 1, 1))
    assert (decodes, extends) == ([], [12])


def test_fp8_rows_are_read_in_the_models_type(monkeypatch):
    """SGLang expands what its pool gives in the type that it is asked for."""
    _, runner = made(monkeypatch, dtype=torch.float8_e4m3fn)
    pool, slots = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token[POOL_ROWS[0], :300]
    latents, rope = pool.get_mla_kv_buffer(theirs.layer(1), slots, torch.bfloat16)
    stored = pool.kv_buffer[1][slots.long()].view(torch.float8_e4m3fn).bfloat16()
    assert torch.equal(torch.cat((latents, rope), dim=-1), stored)


def test_where_queries_of_an_fp8_cache_stay_as_they_are(monkeypatch):
    """In full precision on sm_90, where nothing is gained unless the kernel that joins queries rounds them."""
    found = {}
    for name in ("sm_90", "gfx950"):
        monkeypatch.setattr(integrations, "current_arch", lambda tensor, name=name: archs.get(name))
        for precision in ("full", "fp8"):
            monkeypatch.setattr(integrations, "PRECISION", precision)
            rows = [integrations.fp8_query_rows(torch.ones(1), 64, joined) for joined in (True, False)]
            found[name, precision] = rows
    assert found["sm_90", "full"] == [128, None]
    assert found["sm_90", "fp8"] == [64, 64]
    assert found["gfx950", "full"] == found["gfx950", "fp8"] == [1, 1]


@pytest.mark.parametrize("at_once", [MOST, 32])
def test_sglangs_server_expands_prompts(tmp_path, at_once):
    """Prompts without a prefix, a chunk behind one, and the rest of a prompt, which is too short to expand 128 tokens.
    SGLang then merges the results of at most 32 keys, or attends to all."""
    model = sglang_server.save_model(tmp_path / "model")
    batch = tiny_deepseek.prompts([5, 40, 17, 133])
    options = dict(page_size=16, chunked_prefill_size=64)
    served = sglang_server.server(
        tmp_path / "model",
        tmp_path,
        {"expanded": "sglang_expanded:expand"},
        {"SGLANG_MAX_KV_CHUNK_CAPACITY": str(at_once)},
        **options,
    )
    with served as address:
        for _ in range(2):  # of which the second finds prefixes in the radix cache
            tokens, _ = sglang_server.generate(address, batch)
            assert tokens == [tiny_deepseek.greedy(model, prompt) for prompt in batch]
    (rows,) = installed_plugins.calls(tmp_path)
    expanded = [(row["expanded"], row["expanded_keys"]) for row in rows if "expanded" in row]
    assert any(q_lens == keys for q_lens, keys in expanded)
    behind = [(q_lens, keys) for q_lens, keys in expanded if q_lens != keys]
    assert behind
    if at_once == MOST:
        assert all(sum(keys) > sum(q_lens) for q_lens, keys in behind)
    else:
        assert all(sum(keys) <= at_once for _, keys in behind)
    assert any(max(row["query_tokens"]) > 1 for row in rows if "query_tokens" in row)
