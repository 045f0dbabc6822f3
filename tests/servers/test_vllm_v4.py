"""vLLM's code of DeepSeek V4 and V4.1 for CUDA, on a CPU, with our attention behind it: `tox -e vllm,vllm33`.

Metadata, prefill and decode are vLLM's own. What a layer gives is compared with the definition in fp64, over caches
laid out as vLLM lays them out.
"""

import importlib
import types
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import vllm_v4_cpu as v4
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from mla_suite.integrations import flash_mla, flash_mla_metadata, plugins, vllm_rocm, vllm_v4, vllm_v41
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

DECODES = [1, 1, 4, 1], [5, 140, 300, 1500]  # single tokens, and a verification of three drafts
PREFILLS = [9, 5], [9, 400]  # a prompt, and the next part of one
ULP, BOUND = 2**-7, 2**-8  # of bf16, and what vLLM's own operator may be off by


def layer_and_step(version, ratio, heads):
    """A layer of our class over vLLM's caches and metadata, its step, and what it must give."""
    step = v4.Step(*(a + b for a, b in zip(DECODES, PREFILLS, strict=True)))
    sequences, longest = len(step.q_lens), max(step.seq_lens)
    window = v4.pool(sequences, longest, version.window_page, version.record)
    compressed = None
    if ratio != version.ratios[0]:
        compressed = v4.pool(sequences, longest // ratio + 1, version.block // ratio, version.compressed)
    made = v4.layer(
        vllm_v4.attention_class(v4.kernels_of(version)), ratio, heads, window, compressed, v4.select(step, ratio)
    )
    q = torch.zeros(sum(step.q_lens), made.padded_heads, 512, dtype=torch.bfloat16)
    q[:, :heads] = torch.randn(q.shape[0], heads, 512)
    metadata = v4.metadata(version, ratio, step, window, compressed)
    return made, step, q, metadata, v4.expected(version, made, step, q, window, compressed)


LAYERS = [
    *(pytest.param(v4.V4, ratio, 8, id=f"V4 {ratio}") for ratio in v4.V4.ratios),
    *(pytest.param(v4.V41, ratio, 8, id=f"V4.1 {ratio}") for ratio in v4.V41.ratios),
    pytest.param(v4.V4, 4, 12, id="V4, 12 heads as 16"),
]
if v4.V41_IN_ROWS:
    LAYERS += [pytest.param(v4.V41_528, ratio, 8, id=f"V4.1 {ratio}, 528 bytes") for ratio in v4.V41.ratios]
    LAYERS += [pytest.param(v4.V41_288, ratio, 8, id=f"V4.1 {ratio}, 288 bytes") for ratio in v4.V41.ratios[1:]]


@pytest.mark.parametrize(("version", "ratio", "heads"), LAYERS)
def test_a_layer_gives_what_the_definition_does(version, ratio, heads, monkeypatch):
    """Window, 4:1 and 128:1 layers; decodes, drafts and prompts of one batch; then the next layer of the same kind."""
    made, step, q, metadata, expected = layer_and_step(version, ratio, heads)
    assert made.padded_heads == (16 if heads == 12 else heads)
    calls = []
    decode = v4.kernels_of(version).flash_mla_with_kvcache
    assert decode is flash_mla.flash_mla_with_kvcache
    monkeypatch.setattr(
        v4.kernels_of(version), "flash_mla_with_kvcache", lambda **given: calls.append(given) or decode(**given)
    )
    for _ in range(2):
        found = v4.run(made, q, step, metadata)
        torch.testing.assert_close(found[:, :heads].double(), expected[:, :heads], rtol=ULP, atol=BOUND)
    first, second = calls
    holder = first["tile_scheduler_metadata"]
    assert second["tile_scheduler_metadata"] is holder, "layers of a kind share a step's holder"
    assert not holder.have_initialized, "which vLLM's own kernels may still be given"
    assert flash_mla_metadata.holder_of(holder).config.heads == made.padded_heads


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_of_288_bytes_are_written(ratio):
    """Rotated in fp32 by the position of a group's first token, in pairs of neighbours, rounded to bf16 as `append_kv`
    does for such records, and stored where groups end."""
    tokens, page = 40, 16
    latent = torch.randn(tokens + 3, 512).bfloat16()  # three that pad a batch
    positions = torch.arange(7, 7 + tokens + 3)
    slots = torch.where(torch.arange(tokens) % 5 == 4, -1, torch.randperm(4 * page)[:tokens])
    cos_sin = torch.rand(64, 64) * 2 - 1
    kind = get_kv_format("v41_fp4_interleaved")
    cache = caches.empty(kind, 4, page)
    cache.fill_(7)
    vllm_v41.insert(None, latent, positions, cos_sin, cache, slots, ratio)
    rows, first, ends = latent.float(), positions // ratio * ratio, (positions + 1) % ratio == 0
    (cos, sin), (a, b) = cos_sin[first].chunk(2, dim=1), rows[:, 448:].unflatten(1, (32, 2)).unbind(2)
    turned = a.double() * cos.double() - b * sin, a.double() * sin.double() + b * cos
    rows[:, 448:] = torch.stack(turned, dim=2).float().bfloat16().float().flatten(1)
    expected = torch.full_like(cache, 7)
    for token in range(tokens):
        if slots[token] >= 0 and ends[token]:
            expected[slots[token] // page, slots[token] % page] = caches.pack(kind, rows[token].view(1, 1, 512))[0, 0]
    assert torch.equal(cache, expected)
    given = []
    vllm_v41.insert(
        lambda *args, **options: given.append(args), latent, positions, cos_sin, cache[..., :280], slots, ratio
    )
    assert len(given) == 1, "other records are vLLM's to write"


class TestTheFlag:
    @pytest.fixture
    def model_code(self, monkeypatch):
        """A module as vLLM's of the model, with the function that its layers ask."""
        kernels = v4.kernels_of(v4.V4)
        module = types.ModuleType("model")
        module._select_dsv4_attn_cls = lambda vllm_config: kernels.DeepseekV4FlashMLAAttention
        vllm_v4.offer(module, kernels)
        select = module._select_dsv4_attn_cls
        vllm_v4.offer(module, kernels)
        assert module._select_dsv4_attn_cls is select, "asking twice changes nothing"
        return module

    def test_vllms_code_asks_the_function_that_is_replaced(self):
        for version in (v4.V4, v4.V41):
            model_code = importlib.import_module(f"vllm.models.{version.package}.nvidia.model")
            layer = model_code.DeepseekV4DecoderLayer.__init__.__code__
            assert "_select_dsv4_attn_cls" in layer.co_names
            draft = importlib.import_module(f"vllm.models.{version.package}.nvidia.dspark")
            assert draft.DeepseekV4DecoderLayer is model_code.DeepseekV4DecoderLayer

    def test_registration_imports_nothing_and_hands_out_vllms_models(self):
        plugins.vllm()
        plugins.vllm()
        for name, package in plugins.V4_MODELS.items():
            entry = ModelRegistry.models[name]
            assert (entry.module_name, entry.class_name) == ("mla_suite.integrations.vllm_v4", name)
            assert getattr(vllm_v4, name) is getattr(importlib.import_module(package), name)
        assert AttentionBackendEnum["MLA_SUITE_DSV4"].get_path() == "mla_suite.integrations.vllm_v4.MLASuiteV4Backend"
        with pytest.raises(ValueError, match="MLA_SUITE_DSV4 is for DeepSeek V4 and V4.1: choose CUSTOM"):
            AttentionBackendEnum["MLA_SUITE_DSV4"].get_class()

    def test_it_chooses_our_class_for_the_model_and_its_drafts(self, model_code, monkeypatch):
        kernels, asked = v4.kernels_of(v4.V4), v4.config(v4.V4)
        ours = vllm_v4.attention_class(kernels)
        assert model_code._select_dsv4_attn_cls(asked) is ours
        draft = v4.config(v4.V4)
        draft.attention_config.backend = None
        assert model_code._select_dsv4_attn_cls(draft) is ours, "vLLM names no backend for draft layers"
        draft.attention_config.backend = AttentionBackendEnum.FLASHMLA_SPARSE
        assert model_code._select_dsv4_attn_cls(draft) is kernels.DeepseekV4FlashMLAAttention
        draft.attention_config.backend = None
        monkeypatch.setattr(kernels, "flash_mla_with_kvcache", None)
        assert model_code._select_dsv4_attn_cls(draft) is kernels.DeepseekV4FlashMLAAttention

    def test_it_is_batch_invariant_where_vllm_is_asked_to_be(self, model_code, monkeypatch):
        """vLLM's code calls FlashMLA's functions the same way whether VLLM_BATCH_INVARIANT is set or not."""
        kernels = v4.kernels_of(v4.V4)
        names = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
        for name in names:
            monkeypatch.setattr(kernels, name, getattr(kernels, name))
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        vllm_v4.attention_class.__wrapped__(kernels)
        assert all(getattr(kernels, name).keywords["enable_batch_invariant"] for name in names)
        draft = v4.config(v4.V4)
        draft.attention_config.backend = None
        assert vllm_v4._asked(draft, kernels), "drafts follow the model"

    @pytest.mark.parametrize(
        ("where", "value", "message"),
        [
            ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size is 2"),
            ("kv_transfer_config", object(), "--kv-transfer-config is given"),
            ("attention_config.hisparse_config", object(), "HiSparse is switched on"),
        ],
    )
    def test_what_is_refused(self, model_code, where, value, message):
        vllm_config = v4.config(v4.V4)
        owner, _, name = where.rpartition(".")
        setattr(getattr(vllm_config, owner) if owner else vllm_config, name, value)
        with pytest.raises(NotImplementedError, match=message):
            model_code._select_dsv4_attn_cls(vllm_config)
        vllm_config.attention_config.backend = AttentionBackendEnum.FLASHMLA_SPARSE
        model_code._select_dsv4_attn_cls(vllm_config)

    def test_v41s_own_records_are_stored_where_they_are_asked_for(self, monkeypatch):
        attention, compressor = (import_module(f"{vllm_v41.PACKAGE}.{name}") for name in ("attention", "compressor"))
        theirs = attention._use_v41_mxfp8_kv_record, compressor.rope_quant_insert
        for place, name in ((attention, vllm_v41.GATE), (compressor, vllm_v41.WRITER)):
            monkeypatch.setattr(place, name, getattr(place, name))
        for code in (attention.DeepseekV4Attention.__init__, attention.DeepseekV4IndexerCache.get_kv_cache_spec):
            assert vllm_v41.GATE in code.__code__.co_names, "vLLM's pools ask the function that is replaced"
        assert vllm_v41.WRITER in compressor.DeepseekCompressor.insert_cache.__code__.co_names
        model_code, kernels = types.ModuleType("model"), v4.kernels_of(v4.V41)
        model_code._select_dsv4_attn_cls = lambda vllm_config: kernels.DeepseekV4FlashMLAAttention
        vllm_v4.offer(model_code, kernels)
        model_code._select_dsv4_attn_cls(v4.config(v4.V41))
        assert (attention._use_v41_mxfp8_kv_record, compressor.rope_quant_insert) == theirs
        asked = v4.config(v4.V41)
        asked.cache_config.cache_dtype = "nvfp4_ds_mla"
        if not v4.V41_IN_ROWS:
            with pytest.raises(
                TypeError, match=r"vLLM 0.32.* takes no packed_block_stride_alignment; install vLLM 0.33, or"
            ):
                model_code._select_dsv4_attn_cls(asked)
            assert (attention._use_v41_mxfp8_kv_record, compressor.rope_quant_insert) == theirs
            return
        for _ in range(2):
            model_code._select_dsv4_attn_cls(asked)
            assert attention._use_v41_mxfp8_kv_record()
            assert compressor.rope_quant_insert.args == (theirs[1],)
        monkeypatch.setattr(attention, vllm_v41.GATE, theirs[0])
        monkeypatch.setenv("MLA_SUITE_V41_RECORDS", "1")
        model_code._select_dsv4_attn_cls(v4.config(v4.V41))
        assert attention._use_v41_mxfp8_kv_record()

    def test_v41s_records_are_refused_for_v4_and_on_rocm(self, model_code, monkeypatch):
        monkeypatch.setenv("MLA_SUITE_V41_RECORDS", "1")
        with pytest.raises(ValueError, match="V4.1's records are asked for with another model; V4's are of 584 bytes"):
            model_code._select_dsv4_attn_cls(v4.config(v4.V4))
        monkeypatch.setattr(vllm_v4, "current_platform", SimpleNamespace(is_rocm=lambda: True))
        with pytest.raises(
            NotImplementedError, match="528 or 288 bytes are asked for; vLLM's writers for ROCm store 584"
        ):
            vllm_v4.check(v4.config(v4.V41))

    def test_heads_of_a_rank(self):
        assert [vllm_v4.padded_heads(n) for n in (1, 8, 12, 20, 64, 96)] == [8, 8, 16, 32, 64, 128]
        with pytest.raises(ValueError, match="a rank has 130 heads"):
            vllm_v4.padded_heads(130)


class TestOnRocm:
    """vLLM's files for ROCm import its compiled library, so modules with the same names stand for them."""

    @pytest.fixture
    def on_rocm(self, monkeypatch):
        class Theirs:
            def __init__(self, vllm_config, prefix=""):
                self.prefix = prefix

        kernels = types.ModuleType("rocm")
        kernels.rocm_sparse_attn_decode, kernels._aiter_sparse_mla_enabled = print, lambda has_kv_transfer: True
        kernels.DeepseekV41ROCMAiterMLAAttention = Theirs
        model_code = types.ModuleType("model")
        found = {"amd.model": model_code, "amd.rocm": kernels}
        monkeypatch.setattr(vllm_v4, "import_module", lambda name: found[name.split(".", 1)[1]])
        monkeypatch.setattr(vllm_v4, "current_platform", SimpleNamespace(is_rocm=lambda: True))
        none_set = SimpleNamespace(VLLM_ROCM_MONO_DECODE=False, VLLM_BATCH_INVARIANT=False)
        monkeypatch.setattr(vllm_v4, "envs", none_set)
        return model_code, kernels, Theirs

    @pytest.mark.parametrize("version", [v4.V4, v4.V41], ids=lambda version: version.package)
    def test_decode_is_ours_where_the_flag_asks(self, on_rocm, version, monkeypatch):
        model_code, kernels, theirs = on_rocm
        if version is v4.V4:
            model_code.DeepseekV4ROCMAiterMLAAttention = theirs
        else:
            model_code._select_dsv4_attn_cls = lambda vllm_config: theirs
        for _ in range(2):
            vllm_v4._offer_on_rocm("package")

        def make(vllm_config):
            if version is v4.V4:
                return model_code.DeepseekV4ROCMAiterMLAAttention(vllm_config, prefix="a")
            return model_code._select_dsv4_attn_cls(vllm_config)(vllm_config, prefix="a")

        other = v4.config(version)
        other.attention_config.backend = None
        assert make(other).prefix == "a"
        assert kernels.rocm_sparse_attn_decode is print
        monkeypatch.setattr(vllm_v4.envs, "VLLM_ROCM_MONO_DECODE", True)
        with pytest.raises(NotImplementedError, match="VLLM_ROCM_MONO_DECODE is set"):
            make(v4.config(version))
        monkeypatch.setattr(vllm_v4.envs, "VLLM_ROCM_MONO_DECODE", False)
        assert isinstance(make(v4.config(version)), theirs)
        assert kernels.rocm_sparse_attn_decode is vllm_rocm.rocm_sparse_attn_decode
        monkeypatch.setattr(vllm_v4.envs, "VLLM_BATCH_INVARIANT", True)
        vllm_v4.take_decode_on_rocm(kernels)
        assert kernels.rocm_sparse_attn_decode.keywords == {"enable_batch_invariant": True}
        assert vllm_v4._asked(other, kernels), "drafts follow the model"
        assert not kernels._aiter_sparse_mla_enabled(False)
