"""What our plugin does with SGLang's settings and lists of backends: `tox -e sglang`."""

import argparse
import json
from types import SimpleNamespace

import pytest
import sglang_classes as theirs
import sglang_sparse_classes as sparse
import tiny_deepseek
import torch
from sglang.srt import server_args
from sglang.srt.arg_groups import overrides
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
from sglang.srt.models.deepseek_common import utils as layers
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import draft_utils

from mla_suite.integrations import plugins
from mla_suite.integrations import sglang as integration

OURS = {"attention_backend": "mla_suite"}
CONFIG = tiny_deepseek.SHAPE | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
ON_CPU = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "mem_fraction_static": 0.5,
}


def test_registration(monkeypatch):
    """The entry point adds the name, and draft models of such a server take SGLang's Triton backend."""
    plugins.sglang()
    assert "mla_suite" in server_args.ATTENTION_BACKEND_CHOICES
    assert "mla_suite" in server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    theirs.settings(monkeypatch)
    assert type(ATTENTION_BACKENDS["mla_suite"](theirs.runner(64, torch.bfloat16))) is integration.MLASuiteAttnBackend
    original = draft_utils.DraftBackendFactory._create_backend
    try:
        HookRegistry.apply_hooks()
        factory = draft_utils.DraftBackendFactory(SimpleNamespace(draft_attention_backend="mla_suite"), 1, 3)
        monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("mla_suite", "mla_suite"))
        made = SimpleNamespace()
        backends = {"triton": lambda: ("triton", made)}
        assert factory._create_backend("decode_attention_backend", backends, "no {backend_type}") is made
        assert made.decode_attention_backend_str == "triton"
    finally:
        draft_utils.DraftBackendFactory._create_backend = original


def test_parts_are_asked_for_on_cuda_and_not_where_sglang_scales_queries(monkeypatch):
    theirs.settings(monkeypatch)
    backends = list(layers.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS)
    monkeypatch.setattr(layers, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", backends)
    runner, before = theirs.runner(64, torch.bfloat16), list(backends)

    def listed(cuda, **config):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        runner.model_config.hf_config = SimpleNamespace(**config)
        plugins._sglang_backend(runner)
        return backends

    assert listed(None) == before
    assert listed("13.0", llama_4_scaling={"beta": 0.1}) == before
    assert listed("13.0", llama_4_scaling=None) == [*before, "mla_suite"]
    assert listed("13.0") == [*before, "mla_suite"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (OURS, ("mla_suite", "mla_suite")),
        (OURS | {"kv_cache_dtype": "fp8_e4m3"}, ("mla_suite", "mla_suite")),
        (OURS | {"prefill_attention_backend": "triton"}, ("triton", "mla_suite")),
        ({"attention_backend": "fa3", "decode_attention_backend": "mla_suite"}, ("fa3", "mla_suite")),
    ],
)
def test_prompts_stay_with_our_backend_unless_another_is_named(monkeypatch, tmp_path, options, expected):
    """Where SGLang's own choice would be FlashAttention 3, too."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plugins.sglang()
    monkeypatch.setattr(overrides, "get_default_attn_backend", lambda *args: "fa3")
    given = server_args.ServerArgs(model_path=str(tmp_path), **ON_CPU, **options)
    given.resolve_once()
    assert overrides.attention_backends_of(overrides.resolved_view(given)) == expected


SPARSE = tiny_deepseek.V32 | {"index_topk": 2048, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(("cache", "width"), [("bfloat16", sparse.WIDTH), ("fp8_e4m3", sparse.RECORDS[64][1])])
def test_a_sparse_decode_backend(monkeypatch, tmp_path, cache, width):
    """SGLang's parser takes the name, and nothing in its resolution of a model's options changes or refuses it."""
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    for _ in range(2):  # a process may load its plugins twice
        plugins.sglang()
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    options = ["--model-path", str(tmp_path), "--kv-cache-dtype", cache, "--dsa-decode-backend", "mla_suite"]
    given = parser.parse_args([*options, "--device", "cuda", "--skip-tokenizer-init"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    args = server_args.ServerArgs.from_cli_args(given)
    args.resolve_once()
    resolved = args.resolved_dict()
    assert (resolved["attention_backend"], resolved["page_size"]) == ("dsa", sparse.PAGE)
    assert resolved["dsa_decode_backend"] == "mla_suite"
    with sparse.server(monkeypatch, dsa_prefill_backend=resolved["dsa_prefill_backend"]):
        config = SimpleNamespace(hf_config=SimpleNamespace(**SPARSE), kv_lora_rank=512, qk_rope_head_dim=64)
        dtype = torch.float8_e4m3fn if cache == "fp8_e4m3" else torch.bfloat16
        assert calculate_mla_kv_cache_dim(model_config=config, kv_cache_dtype=dtype) == width
