"""The vLLM backend class on stand-ins for its base classes; test_sglang_backend.py has SGLang's.

Neither server is installed here. The modules imitate, in a few lines of our own, what the two document of the classes
we derive from: names, arguments, attributes and what they call when. They show that our side of that contract
holds together and gives the right numbers; tests/servers runs the servers' own classes.
"""

import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_calls import HEADS, LATENT, WIDTH, entry_point, expected, fresh, modules, paged

import mla_suite
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


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("page", "q_len", "in_two"), [(64, 1, False), (16, 3, True), (1, 2, False)])
def test_vllm_step(vllm, page, q_len, in_two, invariant):
    vllm.stand_in_envs.VLLM_BATCH_INVARIANT = invariant
    backend, lengths = vllm.MLASuiteBackend, [300, 9, 64]
    cache, table = paged(lengths, page)
    config = SimpleNamespace(heads=HEADS, drafts=q_len - 1)
    builder = backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))
    metadata = builder.build(torch.tensor(lengths, dtype=torch.int32), table, q_len)
    assert metadata.decode.plan is None, "the first layer makes it, so that a captured step holds it"
    assert builder.reorder_batch_threshold == (q_len if invariant else 8)
    q = torch.randn(3, q_len, HEADS, WIDTH).bfloat16()
    flat = q.flatten(0, 1)
    given = (flat[..., :LATENT], flat[..., LATENT:]) if in_two else flat
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0))
    out, lse = impl_of(backend).forward_mqa(given, cache, metadata, layer)
    assert Plan.read(metadata.decode.plan).header[Word.SPLIT_SIZE] == (vllm.INVARIANT_SPLIT if invariant else 0)
    want = expected(q, cache, table, lengths, 0.05)
    torch.testing.assert_close(out.float(), want[0], rtol=2**-8, atol=2e-5)
    torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_len", [1, 3])
def test_vllm_invariant_partials_follow_the_lengths(vllm, monkeypatch, q_len):
    """A table as wide as the longest context costs no memory in an eager step, and no bits anywhere."""
    vllm.stand_in_envs.VLLM_BATCH_INVARIANT = True
    lengths, context = [2100, 9, 1025], 2**17
    cache, table = paged(lengths, 64)
    wide = torch.nn.functional.pad(table, (0, context // 64 - table.shape[1]))
    config = SimpleNamespace(heads=HEADS, drafts=q_len - 1)
    builder = vllm.MLASuiteBackend.get_builder_cls()(None, ["layer"], config, "cpu")
    q, impl = torch.randn(3 * q_len, HEADS, WIDTH).bfloat16(), impl_of(vllm.MLASuiteBackend)
    found = {}
    for captured in (False, True):
        monkeypatch.setattr(vllm, "capturing", lambda tensor, captured=captured: captured)
        metadata = builder.build(torch.tensor(lengths, dtype=torch.int32), wide, q_len)
        results = impl.forward_mqa(q, cache, metadata, SimpleNamespace(_k_scale=torch.tensor(1.0)))
        found[captured] = *results, Plan.read(metadata.decode.plan).header[Word.WORK_TILE_CAPACITY]
    assert found[False][2] == 3 * 3, "splits of 1024 keys that 2100 keys need"
    assert found[True][2] == 3 * context // 1024, "a captured step serves every later length"
    assert torch.equal(found[False][0], found[True][0])
    assert torch.equal(found[False][1], found[True][1])


@pytest.mark.parametrize("later", [{}, {"max_query_len": 5}], ids=["before 0.31", "since 0.31"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_vllm_query_lengths_that_vary(vllm, adaptive, later):
    """Drafts that the device moved between sequences count as the device has them."""
    backend, lengths, counted = vllm.MLASuiteBackend, [300, 9, 64], [3, 1, 4]
    on_device = [5, 1, 2] if adaptive else counted
    cache, table = paged(lengths, 16)
    speculation = SimpleNamespace(enable_adaptive_verification=adaptive)
    config = SimpleNamespace(heads=HEADS, speculative_config=speculation)
    builder = backend.get_builder_cls()(None, ["layer"], config, "cpu")
    metadata = builder.build(torch.tensor(lengths, dtype=torch.int32), table, counted, on_device=on_device, **later)
    assert metadata.decode.max_seqlen_q == ((5 if later else 8) if adaptive else 4)
    q = torch.randn(8, HEADS, WIDTH).bfloat16()
    out, lse = impl_of(backend).forward_mqa(q, cache, metadata, SimpleNamespace(_k_scale=torch.tensor(1.0)))
    assert out.shape == (8, HEADS, LATENT)
    first = 0
    for b, count in enumerate(on_device):
        want = expected(q[None, first : first + count], cache, table[b : b + 1], lengths[b : b + 1], 0.05)
        torch.testing.assert_close(out[first : first + count].float(), want[0], rtol=2**-8, atol=2e-5)
        torch.testing.assert_close(lse[first : first + count], want[1], rtol=1e-5, atol=1e-5)
        first += count


def test_vllm_padded_batch_of_a_captured_graph(vllm):
    """Sequences that pad a captured batch have tokens but no queries: they get rows of their own, as in vLLM's."""
    lengths, q_len = [300, 9, 0, 0], 2
    cache, table = paged([300, 9, 1, 1], 16)
    builder = vllm.MLASuiteBackend.get_builder_cls()(None, ["layer"], SimpleNamespace(heads=HEADS), "cpu")
    starts = torch.tensor([0, 2, 4, 4, 4], dtype=torch.int32)
    decode = builder._build_decode(
        block_table_tensor=table,
        seq_lens_device=torch.tensor(lengths, dtype=torch.int32),
        max_seq_len=300,
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        num_decode_tokens=8,
        dcp_tot_seq_lens_device=None,
    )
    assert decode.cu_seqlens_q is None
    q = torch.randn(8, HEADS, WIDTH).bfloat16()
    metadata = SimpleNamespace(num_decodes=4, decode=decode)
    out, lse = impl_of(vllm.MLASuiteBackend).forward_mqa(q, cache, metadata, None)
    want = expected(q[:4].unflatten(0, (2, q_len)), cache, table[:2], lengths[:2], 0.05)
    torch.testing.assert_close(out[:4].float(), want[0], rtol=2**-8, atol=2e-5)
    assert bool((out[4:] == 0).all())
    assert bool((lse[4:] == -torch.inf).all())


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 3], [1, 4]], ids=str)
def test_vllm_decode_context_parallel(vllm, q_lens, interleave):
    """Two ranks with the keys dealt in turn, of which one may have none: natural lse merges them into the whole."""
    backend, lengths, page = vllm.MLASuiteBackend, [301, 5], 16
    assert backend.supports_dcp()
    assert vllm.MLASuiteImpl.can_return_lse_for_decode
    assert vllm.MLASuiteImpl.supports_mtp_with_cp_non_trivial_interleave_size
    totals = torch.tensor(lengths, dtype=torch.int32)
    config = SimpleNamespace(heads=HEADS // 2, dcp=2, interleave=interleave)
    builder = backend.get_builder_cls()(None, ["layer"], config, "cpu")
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
        parts.append(impl.forward_mqa(q, own_cache, metadata, SimpleNamespace(_k_scale=torch.tensor(1.0))))
    lse = torch.stack([part[1] for part in parts])
    merged = (torch.stack([part[0] for part in parts]) * lse.softmax(0)[..., None]).sum(0)
    first = 0
    for b, count in enumerate(q_lens):
        tokens = slice(first, first := first + count)
        want, want_lse = expected(q[None, tokens], cache, table[b : b + 1], lengths[b : b + 1], 0.05)
        torch.testing.assert_close(merged[tokens], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.logsumexp(0)[tokens], want_lse, rtol=1e-5, atol=1e-5)


def test_vllm_fp8_cache(vllm):
    """vLLM hands fp8 caches over as uint8, with one scale per layer."""
    lengths = [100, 9]
    cache, table = paged(lengths, 16, torch.float8_e4m3fn)
    builder = vllm.MLASuiteBackend.get_builder_cls()(None, ["layer"], SimpleNamespace(heads=HEADS), "cpu")
    metadata = builder.build(torch.tensor(lengths, dtype=torch.int32), table, 1)
    q = torch.randn(2, 1, HEADS, WIDTH).bfloat16()
    layer = SimpleNamespace(_k_scale=torch.tensor(0.25))
    impl = impl_of(vllm.MLASuiteBackend, "fp8")
    assert impl.supports_quant_query_input is False
    out, _ = impl.forward_mqa(q.flatten(0, 1), cache.view(torch.uint8), metadata, layer)
    want, _ = expected(q, cache.float() * 0.25, table, lengths, 0.05)
    torch.testing.assert_close(out.float(), want, rtol=2**-8, atol=2e-5)


def test_vllm_writes_on_a_cpu(vllm):
    """From 0.33 on vLLM says that a layer's scale is 1, where an fp8 row is stored undivided."""
    impl, rows = impl_of(vllm.MLASuiteBackend, "fp8"), torch.randn(3, WIDTH)
    for skip_scale, scale in (((), 0.25), ((False,), 0.25), ((True,), 1.0)):
        cache = torch.zeros(1, 16, WIDTH, dtype=torch.uint8)
        given = rows[:, :LATENT], rows[:, None, LATENT:], cache, torch.tensor([2, -1, 5]), "fp8", torch.tensor(0.25)
        impl.do_kv_cache_update(*given, *skip_scale)
        stored = cache[0].view(torch.float8_e4m3fn).float()
        assert torch.equal(stored[[2, 5]], (rows[[0, 2]] / scale).to(torch.float8_e4m3fn).float())
        assert not stored[[0, 1, 3, 4, *range(6, 16)]].any()


def test_vllm_writes_on_a_gpu_are_its_own(vllm, monkeypatch):
    """A release that knows no skip_scale is not given it."""
    calls, impl = [], impl_of(vllm.MLASuiteBackend, "fp8")
    monkeypatch.setattr(vllm.MLAAttentionImpl, "do_kv_cache_update", lambda self, *args: calls.append(args))
    given = *(torch.empty(1, 1, device="meta") for _ in range(4)), "fp8", torch.ones(1)
    for skip_scale in ((), (False,), (True,)):
        impl.do_kv_cache_update(*given, *skip_scale)
    assert [len(args) for args in calls] == [6, 6, 7]
    assert calls[2][6] is True


def test_vllm_layers_share_the_plan_of_their_step(vllm):
    """The first layer makes it; a step with other lengths has a plan of its own."""
    backend = vllm.MLASuiteBackend
    builder = backend.get_builder_cls()(None, ["first", "second"], SimpleNamespace(heads=HEADS), "cpu")
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0))
    plans = []
    for lengths in ([5000, 10], [10, 5000]):
        cache, table = paged(lengths, 64)
        lens = torch.tensor(lengths, dtype=torch.int32)
        metadata = builder.build(lens, table, 1)
        q = torch.randn(2, HEADS, WIDTH).bfloat16()
        for _ in range(2):
            impl_of(backend).forward_mqa(q, cache, metadata, layer)
            plans.append(metadata.decode.plan)
        assert plans[-1] is plans[-2]
        assert torch.equal(plans[-1], mla_suite.plan(lens, num_heads=HEADS))
    assert not torch.equal(plans[0], plans[2])


def test_vllm_names_and_refusals(vllm):
    backend = vllm.MLASuiteBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.supports_compute_capability(None)
    assert backend.get_supported_kernel_block_sizes() == backend.get_supported_kernel_block_sizes(None) == [1]
    assert backend.get_preferred_block_size(16) == 64
    assert not backend.supports_pcp()
    with pytest.raises(NotImplementedError, match="logits_soft_cap is set"):
        impl_of(backend, logits_soft_cap=30.0)
    with pytest.raises(NotImplementedError, match="decoder self-attention only"):
        impl_of(backend, attn_type="encoder")


def test_the_shipped_entry_point_registers_with_vllm(vllm, monkeypatch):
    registered = {}
    registry = dict(AttentionBackendEnum=SimpleNamespace(CUSTOM="CUSTOM"), register_backend=registered.__setitem__)
    modules(monkeypatch, vllm__v1__attention__backends__registry=registry)
    entry_point("vllm.general_plugins")()
    module, _, name = registered["CUSTOM"].rpartition(".")
    assert getattr(fresh(monkeypatch, module), name).get_name() == "CUSTOM"


def _renamed(self, kv_c_normed, k_pe, kv_cache, slots, kv_cache_dtype, k_scale):
    raise AssertionError


def _longer(self, q, kv_c_and_k_pe_cache, attn_metadata, layer, window):
    raise AssertionError


@pytest.mark.parametrize(
    ("owner", "name", "changed", "how"),
    [
        (
            "MLACommonImpl",
            "do_kv_cache_update",
            _renamed,
            r"\.do_kv_cache_update of vLLM 0.33.0 takes no slot_mapping;",
        ),
        (
            "MLACommonImpl",
            "forward_mqa",
            _longer,
            r"\.forward_mqa of vLLM 0.33.0 takes window, whose meaning is not known",
        ),
        (
            "MLACommonMetadataBuilder",
            "_build_decode",
            None,
            r" of vLLM 0.33.0 has no _build_decode; install vLLM 0.25 to",
        ),
    ],
)
def test_a_vllm_with_another_interface_is_refused(vllm, monkeypatch, owner, name, changed, how):
    """One that names an argument otherwise, one that passes another, one that asks for no decode metadata."""
    with monkeypatch.context() as other:
        if changed is None:
            other.delattr(getattr(vllm, owner), name)
        else:
            other.setattr(getattr(vllm, owner), name, changed)
        with pytest.raises(TypeError, match=f"^MLASuiteBackend: {owner}{how}"):
            vllm.MLASuiteBackend.get_impl_cls()
    assert vllm.MLASuiteBackend.get_impl_cls() is vllm.MLASuiteImpl


def test_a_vllm_whose_layers_lack_an_attribute_is_refused(vllm, monkeypatch):
    monkeypatch.delattr(vllm.MLACommonImpl, "dcp_rank")
    with pytest.raises(
        TypeError, match=r"^MLASuiteImpl: MLAAttentionImpl of vLLM 0.33.0 has no dcp_rank; install vLLM"
    ):
        impl_of(vllm.MLASuiteBackend)


def test_a_newer_vllm_with_this_interface_works_with_one_warning(vllm, monkeypatch):
    monkeypatch.setattr(vllm.vllm_interface, "__version__", "0.41.2")
    with pytest.warns(UserWarning, match=r"MLASuiteBackend: vLLM 0\.41\.2 is newer than 0\.33"):
        vllm.MLASuiteBackend.get_impl_cls()
    vllm._check_interface.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test_vllm_step(vllm, 64, 1, in_two=False, invariant=False)


@pytest.mark.parametrize(("name", "needs"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_without_the_server_the_import_says_so(name, needs):
    code = f"""
import sys
sys.modules[{name!r}] = None
try:
    import mla_suite.integrations.{name}
except ImportError as error:
    print(error)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert f"mla_suite.integrations.{name} needs {needs}" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
