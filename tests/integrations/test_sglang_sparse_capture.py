"""The SGLang backend for models with an indexer on a stand-in for its base class; tests/servers has SGLang's own.

The stand-in calls the kernel as SGLang does, and nothing else, so that every operation seen is ours.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from server_calls import HEADS, LATENT, WIDTH, fresh, modules
from test_capturable import crossings, on_device

PAGE, TOPK = 64, 32
RECORD = 656


@pytest.fixture
def make(monkeypatch):
    class TritonAttnBackend:
        """The base of the dense backend, which is not made here."""

    class DeepseekSparseAttnBackend:
        """Sends decodes, and prompts as well, to its method for FlashMLA's sparse kernel."""

        device, dsa_index_kpool, kv_lora_rank, qk_rope_head_dim = "cpu", 1, LATENT, WIDTH - LATENT
        dsa_decode_impl = "flashmla_sparse"

        def __init__(self, model_runner):
            self.token_to_kv_pool = model_runner
            self.dsa_kv_cache_store_fp8 = model_runner.dtype == torch.float8_e4m3fn

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            cache, slots, lengths = k, *forward_batch
            call = dict(q_all=q, kv_cache=cache, v_head_dim=LATENT, page_table_1=slots, sm_scale=0.07)
            return self._forward_flashmla_sparse(**call, topk_length=lengths, attn_sink=None)

        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            """Not called."""

        def _forward_flashmla_sparse(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale):
            """Overridden."""

    attention = "sglang__srt__layers__attention__"
    modules(
        monkeypatch,
        **{
            "sglang": dict(__version__="0.5.23"),
            "sglang__srt__mem_cache__memory_pool": dict(MLATokenToKVPool=None),
            "sglang__srt__model_executor__forward_batch_info": dict(ForwardBatch=None, ForwardMode=None),
            f"{attention}triton_backend": dict(TritonAttnBackend=TritonAttnBackend),
            f"{attention}dsa_backend": dict(DeepseekSparseAttnBackend=DeepseekSparseAttnBackend),
        },
    )
    dense = fresh(monkeypatch, "mla_suite.integrations.sglang")
    monkeypatch.setitem(sys.modules, "mla_suite.integrations.sglang", dense)
    module = fresh(monkeypatch, "mla_suite.integrations.sglang_sparse")
    return lambda dtype: module.MLASuiteSparseAttnBackend(SimpleNamespace(dtype=dtype, page_size=PAGE))


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, WIDTH), (torch.float16, WIDTH), (torch.float8_e4m3fn, RECORD)]
)
def test_nothing_crosses_between_host_and_device(make, dtype, width):
    backend = make(dtype)
    q = on_device(3, HEADS, WIDTH, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    cache = on_device(4 * PAGE, 1, width, dtype=dtype)
    assert crossings(lambda: backend.forward_decode(q, cache, None, None, (on_device(3, TOPK), on_device(3)))) == []
