"""SGLang's own cases of DeepSeek V4.1's attention over V4.1's records of 528 and 288 bytes: `tox -e sglang`.

The layout is asked for as a server is asked, chosen by SGLang's function, and kept by SGLang's pool. `append_kv`, which
writes the bytes of SGLang's torch oracle (`test_sglang_records.py`), stands for SGLang's CUDA programs that store rows.
SGLang's Triton kernels gather. The reference is SGLang's, given what the records hold of each row.
"""

import pytest
import sglang_v4_cpu as v4
import torch
from sglang.kernels.ops.attention.dsv4 import dequant_k_cache
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context
from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as oracle

import mla_suite
from mla_suite.integrations import plugins, sglang_v4, sglang_v41

KV_FORMATS = {"v41": "v41", "v41_new": "v41_interleaved", "v41_fp4": "v41_fp4", "v41_fp4_new": "v41_fp4_interleaved"}
CHOICES = {  # the values of SGLang's two variables: the layouts of the window and of the compressed pools
    ("v41", "auto"): ("v41", "v41_fp4"),
    ("v41", "fp8"): ("v41", "v41"),
    ("v41_new", "auto"): ("v41_new", "v41_fp4_new"),
    ("v41_new", "fp8"): ("v41_new", "v41_new"),
}


def store(input, cache, indices, *, page_size, type, layout, freqs_cis=None):
    """SGLang's `fused_store_cache` of rows that are rotated already."""
    assert type == "flashmla"
    assert freqs_cis is None
    width = layout.bytes_per_token
    pages = cache.view(torch.uint8)[:, : page_size * width].view(-1, page_size, width)
    mla_suite.append_kv(input[:, :448], input[:, 448:], pages, indices, kv_format=KV_FORMATS[layout.value])


def kept(rows, layout):
    """What a record of this layout holds of bf16 rows [n, 512], by SGLang's oracle."""
    fp4 = layout.is_fp4
    write, read = (
        (oracle.quantize_k_cache_v41_fp4, oracle.dequantize_k_cache_v41_fp4)
        if fp4
        else (oracle.quantize_k_cache_v41, oracle.dequantize_k_cache_v41)
    )
    return read(write(rows[None]), len(rows)).view(len(rows), 512).to(rows.dtype)


class Pool(deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool):
    """SGLang's pool, made with the layouts that SGLang chooses, whose setters of the V4 record take rows instead."""

    def __init__(self, **given):
        layout, compressed = kv_cache_configurator.select_dsv4_kv_layout()
        super().__init__(**given, kv_layout=layout, compressed_kv_layout=compressed)

    def set_swa_key_buffer_radix(self, layer_id, swa_loc, cache_nope_fp8_rope_bf16_pack):
        self.set_swa_key_buffer_radix_fused(layer_id, swa_loc, cache_nope_fp8_rope_bf16_pack)

    def set_extra_key_buffer(self, layer_id, loc, cache_nope_fp8_rope_bf16_pack):
        self.set_extra_key_buffer_fused(layer_id, loc, cache_nope_fp8_rope_bf16_pack)


@pytest.fixture
def ask(monkeypatch):
    """Asks for layouts as a server's environment does."""

    def ask(layout, compressed="auto"):
        monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", layout)
        monkeypatch.setenv("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", compressed)
        plugins.sglang()
        HookRegistry.apply_hooks()

    return ask


@pytest.fixture(params=CHOICES, ids="-".join)
def calls(request, ask, monkeypatch):
    v4.pass_for_a_gpu(monkeypatch)
    ask(*request.param)
    fixture, (window, compressed) = v4.fixture, map(KVLayout.parse, CHOICES[request.param])
    monkeypatch.setattr(fixture, "DeepSeekV4TokenToKVPool", Pool)
    monkeypatch.setattr(fixture, "quant_to_nope_fp8_rope_bf16_pack_triton", lambda rows: rows)
    monkeypatch.setattr(deepseek_v4_memory_pool, "fused_store_cache", store)
    monkeypatch.setattr(dequant_k_cache, "get_jit_cuda_arch", dequant_k_cache.get_jit_cuda_arch)
    write_window, write_extra = fixture._populate_swa_kv_cache, fixture._populate_extra_kv_cache

    def populate_window(made, **given):
        slots = write_window(made, **given)
        made._swa_bf16_k_per_req = [kept(rows, window) for rows in made._swa_bf16_k_per_req]
        return slots

    def populate_extra(made, **given):
        entries = write_extra(made, **given)
        made._extra_bf16_k = kept(made._extra_bf16_k, compressed)
        return entries

    monkeypatch.setattr(fixture, "_populate_swa_kv_cache", populate_window)
    monkeypatch.setattr(fixture, "_populate_extra_kv_cache", populate_extra)
    with v4.counted(monkeypatch) as seen:
        yield seen


def test_window(calls):
    case = v4.case(ForwardMode.DECODE, 0, (200, 40, 3), heads=64)
    v4.fixture.run_dsv4_attention_case(v4.Testcase, case, device="cpu")
    assert calls == [("flash_mla_with_kvcache", 64, 528)]


@pytest.mark.parametrize("verify", [True, False], ids=["verification", "draft extend"])
def test_drafts_of_a_window(verify, calls):
    v4.verify_or_extend(verify)
    assert calls == [("flash_mla_with_kvcache", 8, 528)]


@pytest.mark.parametrize("sparse_prefill", [False, True], ids=["two pools", "gathered"])
@pytest.mark.parametrize(("ratio", "prefix", "extend"), [(1, (100,), (9,)), (2, (0,), (40,))])
def test_window_and_compressed_entries(ratio, prefix, extend, sparse_prefill, calls, request):
    """By the call over two pools of records, and by the gather of prefill, which SGLang has for SM100 alone."""
    case = v4.case(ForwardMode.EXTEND, ratio, prefix, extend)
    v4.fixture.run_dsv4_compress_attention_case(v4.Testcase, case, sparse_prefill=sparse_prefill, device="cpu")
    width = 288 if "auto" in request.node.callspec.params["calls"] else 528
    called = ("flash_mla_sparse_fwd", 8) if sparse_prefill else ("flash_mla_with_kvcache", 8, 528, width)
    assert calls == [called]


def chosen(backend="mla_suite"):
    with get_context().override_server_args(dsv4_attn_backend=backend):
        return deepseek_v4_memory_pool.select_dsv4_kv_layout()


@pytest.mark.parametrize(("backend", "capability"), [("flashmla", (9, 0)), ("mla_suite", (8, 0))])
def test_other_backends_and_gpus_have_sglangs_choice(backend, capability, ask, monkeypatch):
    ask("v41")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    with pytest.raises(AssertionError, match="need an SM100"):
        chosen(backend)


def test_nothing_changes_unless_asked(ask, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    for layout in ("v4", "auto"):
        ask(layout)
        assert chosen() == (KVLayout.V4, None)


def test_v4_is_refused():
    with pytest.MonkeyPatch.context() as patch:
        v4.pass_for_a_gpu(patch)
        sglang_v4.check(v4.runner_for_checks(layout="v41", ratios=(1, 2)))
        with pytest.raises(NotImplementedError, match="the layout 'v41_new' of V4.1 is asked for with V4"):
            sglang_v4.check(v4.runner_for_checks(layout="v41_new", ratios=(4, 128)))


def test_another_gather_is_refused(monkeypatch):
    monkeypatch.delattr(dequant_k_cache, "get_jit_cuda_arch")
    with pytest.raises(TypeError, match="dequant_k_cache of SGLang .* has no get_jit_cuda_arch"):
        sglang_v41.take_gather()
