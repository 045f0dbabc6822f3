"""The vLLM backend class on stand-ins for its base classes; test_sglang_backend.py has SGLang's.

Neither server is installed here, and tests/servers runs the servers' own classes. The modules imitate, in a few lines
of our own, what the two document of the classes we derive from, so that a plain run notices a wrong number, too.
"""

import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_calls import HEADS, LATENT, WIDTH, expected, fresh, modules, paged

import mla_suite
from mla_suite import archs, integrations
from mla_suite.distributed import KeyShard
from mla_suite.ops.plan.metadata import Plan, Word


@pytest.fixture
def vllm(monkeypatch):
    class MLACommonBackend:
        """Says of a backend what vLLM's selector asks."""

    @dataclass
    class MLACommonDecodeMetadata:
        block_table: torch.Tensor
        seq_lens: torch.Tensor
        dcp_tot_seq_lens: Any

    @dataclass
    class MLACommonMetadata:
        num_decodes: int
        num_decode_tokens: int
        decode: Any

    class MLACommonMetadataBuilder:
        """Splits a batch into decodes and prefills, and has the decodes' metadata made by _build_decode."""

        def __init__(self, kv_cache_spec, layer_names, vllm_config, device, metadata_cls,
                     supports_dcp_with_varlen=False):  # fmt: skip
            self.num_heads, self.device, self.metadata_cls = vllm_config.heads, device, metadata_cls
            self.cp_kv_cache_interleave_size = getattr(vllm_config, "interleave", 1)
            drafts = getattr(vllm_config, "drafts", 0)
            self.reorder_batch_threshold = max(self.reorder_batch_threshold, 1 + drafts)
            if getattr(vllm_config, "dcp", 1) > 1 and not supports_dcp_with_varlen:
                self.reorder_batch_threshold = 1

        def build(self, seq_lens, block_table, q_len, dcp=None, on_device=None, **later):
            """q_len: of all sequences, or of each; on_device: query lengths there, where they differ."""
            batch = len(seq_lens)
            q_lens = torch.tensor([q_len] * batch if isinstance(q_len, int) else q_len)
            starts = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).int()
            moved = starts if on_device is None else torch.nn.functional.pad(torch.tensor(on_device).cumsum(0), (1, 0))
            tokens = int(starts[-1])
            decode = self._build_decode(
                block_table_tensor=block_table,
                seq_lens_device=seq_lens,
                max_seq_len=int(seq_lens.max()),
                query_start_loc_cpu=starts,
                query_start_loc_device=moved.int(),
                num_decode_tokens=tokens,
                dcp_tot_seq_lens_device=dcp,
                **later,
            )
            return self.metadata_cls(batch, tokens, decode)

        def _build_decode(self, block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu,
                          query_start_loc_device, num_decode_tokens, dcp_tot_seq_lens_device):  # fmt: skip
            raise AssertionError("ours takes its place")

    class MLAAttentionImpl:
        """The base of dense and sparse layers."""

        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
            raise AssertionError("ours takes its place")

        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
            raise AssertionError("it is for GPUs")

    class MLACommonImpl(MLAAttentionImpl):
        """Keeps its arguments; calls forward_mqa with the tokens of the decodes."""

        dcp_world_size, dcp_rank = 1, 0

        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                     logits_soft_cap, attn_type, kv_sharing_target_layer_name, **mla_args):  # fmt: skip
            self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
            self.kv_lora_rank = mla_args["kv_lora_rank"]
            self.supports_quant_query_input = True

    names = (MLACommonBackend, MLACommonDecodeMetadata, MLACommonMetadata, MLACommonMetadataBuilder, MLACommonImpl)
    envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    support = SimpleNamespace(UNIFORM="uniform", SINGLE_ONLY="single", VARLEN="varlen")
    modules(
        monkeypatch,
        vllm=dict(__version__="0.33.0", envs=envs),
        vllm__model_executor__layers__attention__mla_attention={
            **{cls.__name__: cls for cls in names},
            "QueryLenSupport": support,
        },
        vllm__config=dict(get_current_vllm_config=lambda: module.stand_in_config),
        vllm__platforms=dict(current_platform=SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)),
        vllm__v1__attention__backend=dict(
            AttentionCGSupport=SimpleNamespace(UNIFORM_BATCH=2),
            AttentionType=SimpleNamespace(DECODER="decoder"),
            MLAAttentionImpl=MLAAttentionImpl,
            MultipleOf=int,
        ),
    )
    module = fresh(monkeypatch, "mla_suite.integrations.vllm")
    module.stand_in_envs = envs
    module.stand_in_config = None  # vLLM's, which is read on archs alone that gain from fp8 queries
    return module


def impl_of(backend, kv_cache_dtype="auto", **changes):
    arguments = dict(
        num_heads=HEADS,
        head_size=WIDTH,
        scale=0.05,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        kv_lora_rank=LATENT,
    )
    return backend.get_impl_cls()(**{**arguments, **changes})


def layer_of(scale=1.0, q_scale=1.0):
    return SimpleNamespace(_k_scale=torch.tensor(scale), _q_scale=torch.tensor(q_scale))


def builder_of(vllm, **config):
    backend = vllm.MLASuiteBackend
    return backend.get_builder_cls()(None, ["layer"], SimpleNamespace(**{"heads": HEADS} | config), torch.device("cpu"))


def config_of(dtype, block_size=None, speculation=None):
    """The parts of vLLM's configuration that a layer reads."""
    # vLLM's default is replaced by the backend's own after layers are made.
    pages = SimpleNamespace(block_size=block_size or 16, user_specified_block_size=block_size is not None)
    parts = dict(model_config=SimpleNamespace(dtype=dtype), cache_config=pages)
    return SimpleNamespace(**parts, speculative_config=speculation)


def assert_attended(found, expected):
    torch.testing.assert_close(found[0].float(), expected[0], rtol=2**-8, atol=2e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_len", [1, 4])
def test_queries_that_vllm_quantised(vllm, q_len):
    lengths = [300, 9, 64]
    cache, table = paged(lengths, 16, torch.float8_e4m3fn)
    metadata = builder_of(vllm).build(torch.tensor(lengths, dtype=torch.int32), table, q_len)
    q = torch.randn(3, q_len, HEADS, WIDTH).to(torch.float8_e4m3fn)
    impl = impl_of(vllm.MLASuiteBackend, "fp8")
    found = impl.forward_mqa(q.flatten(0, 1), cache.view(torch.uint8), metadata, layer_of(0.25, 0.5))
    assert found[0].dtype == torch.bfloat16
    assert_attended(found, expected(q.float() * 0.5, cache.float() * 0.25, table, lengths, 0.05))


@pytest.mark.parametrize(
    ("arch", "heads", "drafts", "dtype", "asked"),
    [
        ("gfx950", 16, None, torch.bfloat16, True),
        ("gfx950", 16, None, torch.float16, False),  # results would have another type than the model
        ("gfx942", 128, None, torch.bfloat16, False),
        ("sm_90", 128, None, torch.bfloat16, True),
        ("sm_90", 64, None, torch.bfloat16, False),
        ("sm_90", 32, 3, torch.bfloat16, True),
    ],
)
def test_vllm_is_asked_for_fp8_queries_where_they_are_faster(vllm, monkeypatch, arch, heads, drafts, dtype, asked):
    speculation = None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts)
    vllm.stand_in_config = config_of(dtype, None, speculation)
    monkeypatch.setattr(integrations, "current_arch", lambda tensor: archs.get(arch))
    assert impl_of(vllm.MLASuiteBackend, "fp8", num_heads=heads).supports_quant_query_input is asked


@pytest.mark.parametrize(
    ("heads", "page", "asked"), [(64, 64, True), (64, 16, False), (128, 16, True), (64, None, True)]
)
def test_fp8_queries_are_for_pages_whose_scores_may_be_sums_of_fp8(vllm, monkeypatch, heads, page, asked):
    vllm.stand_in_config = config_of(torch.bfloat16, page)
    monkeypatch.setattr(integrations, "current_arch", lambda tensor: archs.get("sm_90"))
    monkeypatch.setattr(integrations, "PRECISION", "fp8")
    assert impl_of(vllm.MLASuiteBackend, "fp8", num_heads=heads).supports_quant_query_input is asked


@pytest.mark.parametrize("q_len", [1, 3])
def test_vllm_invariant_partials_follow_the_lengths(vllm, monkeypatch, q_len):
    """A table as wide as the longest context costs no memory in an eager step, and no bits anywhere."""
    vllm.stand_in_envs.VLLM_BATCH_INVARIANT = True
    lengths, context = [2100, 9, 1025], 2**17
    cache, table = paged(lengths, 64)
    wide = torch.nn.functional.pad(table, (0, context // 64 - table.shape[1]))
    builder = builder_of(vllm, drafts=q_len - 1)
    q, impl = torch.randn(3 * q_len, HEADS, WIDTH).bfloat16(), impl_of(vllm.MLASuiteBackend)
    found = {}
    for captured in (False, True):
        monkeypatch.setattr(vllm, "capturing", lambda tensor, captured=captured: captured)
        metadata = builder.build(torch.tensor(lengths, dtype=torch.int32), wide, q_len)
        results = impl.forward_mqa(q, cache, metadata, layer_of())
        found[captured] = *results, Plan.read(metadata.decode.plan).header[Word.WORK_TILE_CAPACITY]
    split_size = mla_suite.batch_invariant_split_size(HEADS, q_len)
    assert found[False][2] == 3 * -(-2100 // split_size), "the splits that 2100 keys need"
    assert found[True][2] == 3 * context // split_size, "a captured step serves every later length"
    assert torch.equal(found[False][0], found[True][0])
    assert torch.equal(found[False][1], found[True][1])


@pytest.mark.parametrize("later", [{}, {"max_query_len": 5}], ids=["before 0.31", "since 0.31"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_vllm_query_lengths_that_vary(vllm, adaptive, later):
    """Drafts that the device moved between sequences count as the device has them."""
    lengths, counted = [300, 9, 64], [3, 1, 4]
    on_device = [5, 1, 2] if adaptive else counted
    cache, table = paged(lengths, 16)
    speculation = SimpleNamespace(enable_adaptive_verification=adaptive)
    builder = builder_of(vllm, speculative_config=speculation)
    metadata = builder.build(torch.tensor(lengths, dtype=torch.int32), table, counted, on_device=on_device, **later)
    assert metadata.decode.max_seqlen_q == ((5 if later else 8) if adaptive else 4)
    q = torch.randn(8, HEADS, WIDTH).bfloat16()
    out, lse = impl_of(vllm.MLASuiteBackend).forward_mqa(q, cache, metadata, layer_of())
    assert out.shape == (8, HEADS, LATENT)
    first = 0
    for b, count in enumerate(on_device):
        want = expected(q[None, first : first + count], cache, table[b : b + 1], lengths[b : b + 1], 0.05)
        assert_attended((out[first : first + count], lse[first : first + count]), want)
        first += count


@pytest.mark.parametrize(("q_lens", "interleave"), [([1, 1], 1), ([3, 3], 16), ([1, 4], 16)], ids=str)
def test_vllm_decode_context_parallel(vllm, q_lens, interleave):
    """Two ranks with the keys dealt in turn, of which one may have none: natural lse merges them into the whole."""
    backend, lengths, page = vllm.MLASuiteBackend, [301, 5], 16
    assert backend.supports_dcp()
    assert vllm.MLASuiteImpl.can_return_lse_for_decode
    assert vllm.MLASuiteImpl.supports_mtp_with_cp_non_trivial_interleave_size
    totals = torch.tensor(lengths, dtype=torch.int32)
    builder = builder_of(vllm, heads=HEADS // 2, dcp=2, interleave=interleave)
    assert builder.reorder_batch_threshold == 8
    cache, table = paged(lengths, page, torch.float32)
    q = torch.randn(sum(q_lens), HEADS, WIDTH)
    parts = []
    for rank in range(2):
        shard = KeyShard(2, rank, interleave)
        own_cache = torch.full_like(cache, torch.nan)
        for b, length in enumerate(lengths):
            own = cache[table[b].long()].flatten(0, 1)[:length][shard.owns(torch.arange(length))]
            for column, rows in enumerate(own.split(page)):
                own_cache[table[b, column], : len(rows)] = rows
        metadata = builder.build(shard.local_lens(totals), table, q_lens, dcp=totals)
        impl = impl_of(backend)
        impl.dcp_world_size, impl.dcp_rank = 2, rank
        parts.append(impl.forward_mqa(q, own_cache, metadata, layer_of()))
    lse = torch.stack([part[1] for part in parts])
    merged = (torch.stack([part[0] for part in parts]) * lse.softmax(0)[..., None]).sum(0)
    first = 0
    for b, count in enumerate(q_lens):
        tokens = slice(first, first := first + count)
        want, want_lse = expected(q[None, tokens], cache, table[b : b + 1], lengths[b : b + 1], 0.05)
        torch.testing.assert_close(merged[tokens], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.logsumexp(0)[tokens], want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "needs"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_without_the_server_the_import_says_so(monkeypatch, name, needs):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"mla_suite.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"mla_suite.integrations.{name} needs {needs}"):
        importlib.import_module(f"mla_suite.integrations.{name}")
