"""The vLLM and SGLang backend classes, on stand-ins for their base classes.

Neither server is installed here. The modules below imitate, in a few lines of our own, what the two document of the
classes we derive from: names, arguments, attributes and what they call when. They show that our side of that contract
holds together and gives the right numbers; tests/servers runs the servers' own classes.
"""

import importlib
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mla_suite

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEADS, LATENT, WIDTH = 8, 512, 576


def modules(monkeypatch, **contents):
    """Put modules (dots as __) into sys.modules, with their parents."""
    for name, content in contents.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for key, value in content.items():
            setattr(sys.modules[".".join(parts)], key, value)


def fresh(monkeypatch, name):
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def attend(q, keys, scale):
    scores = q.float() @ keys.float().T * scale
    return torch.softmax(scores, -1) @ keys[:, :LATENT].float(), scores.logsumexp(-1)


def paged(lengths, page, dtype=torch.bfloat16):
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 1).int()
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    cache = torch.randn(len(order), page, WIDTH).to(dtype)
    first = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[first : first + count]
        first += count
    return cache, table


def expected(q, cache, table, lengths, scale):
    """q [batch, q_len, heads, 576], causal."""
    outs, lses = [], []
    for b, length in enumerate(lengths):
        keys = cache[table[b].long()].flatten(0, 1)[:length]
        for i in range(q.shape[1]):
            out, lse = attend(q[b, i], keys[: length - q.shape[1] + 1 + i], scale)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


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

        def __init__(self, kv_cache_spec, layer_names, vllm_config, device, metadata_cls):
            self.num_heads, self.device, self.metadata_cls = vllm_config.heads, device, metadata_cls
            self.dcp_world_size = getattr(vllm_config, "dcp", 1)
            drafts = getattr(vllm_config, "drafts", 0)
            self.reorder_batch_threshold = max(self.reorder_batch_threshold, 1 + drafts)

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

    class MLACommonImpl:
        """Keeps its arguments; calls forward_mqa with the tokens of the decodes."""

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
        vllm=dict(envs=envs),
        vllm__model_executor__layers__attention__mla_attention={
            **{cls.__name__: cls for cls in names},
            "QueryLenSupport": support,
        },
        vllm__platforms=dict(current_platform=SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)),
        vllm__v1__attention__backend=dict(
            AttentionCGSupport=SimpleNamespace(UNIFORM_BATCH=2),
            AttentionType=SimpleNamespace(DECODER="decoder"),
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
    assert (metadata.decode.plan is None) == invariant
    assert builder.reorder_batch_threshold == (q_len if invariant else 8)
    q = torch.randn(3, q_len, HEADS, WIDTH).bfloat16()
    flat = q.flatten(0, 1)
    given = (flat[..., :LATENT], flat[..., LATENT:]) if in_two else flat
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0))
    out, lse = impl_of(backend).forward_mqa(given, cache, metadata, layer)
    want = expected(q, cache, table, lengths, 0.05)
    torch.testing.assert_close(out.float(), want[0], rtol=2**-8, atol=2e-5)
    torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-5)


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


def test_vllm_decode_context_parallel(vllm):
    """Two ranks with alternate keys of one token's context: natural lse merges them into the whole."""
    backend, length, page = vllm.MLASuiteBackend, 301, 16
    assert backend.supports_dcp()
    assert vllm.MLASuiteImpl.can_return_lse_for_decode
    keys, q = torch.randn(length, WIDTH), torch.randn(1, HEADS, WIDTH)
    parts = []
    for rank in range(2):
        own = keys[rank::2]
        pages = -(-len(own) // page)
        cache = torch.zeros(pages * page, WIDTH)
        cache[: len(own)] = own
        config = SimpleNamespace(heads=HEADS // 2, dcp=2)
        builder = backend.get_builder_cls()(None, ["layer"], config, "cpu")
        local = torch.tensor([len(own)], dtype=torch.int32)
        table = torch.arange(pages, dtype=torch.int32)[None]
        metadata = builder.build(local, table, 1, dcp=torch.tensor([length], dtype=torch.int32))
        layer = SimpleNamespace(_k_scale=torch.tensor(1.0))
        parts.append(impl_of(backend).forward_mqa(q, cache.view(pages, page, WIDTH), metadata, layer))
    lse = torch.stack([part[1] for part in parts])
    weights = (lse - lse.logsumexp(0)).exp()
    merged = (torch.stack([part[0] for part in parts]) * weights[..., None]).sum(0)
    want, want_lse = attend(q[0], keys, 0.05)
    torch.testing.assert_close(merged[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.logsumexp(0)[0], want_lse, rtol=1e-5, atol=1e-5)


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


def test_vllm_plan_stays_in_place(vllm):
    """A captured graph reads the plan of its batch size from one tensor, whatever the lengths of the step."""
    builder = vllm.MLASuiteBackend.get_builder_cls()(None, ["layer"], SimpleNamespace(heads=HEADS), "cpu")
    table = torch.zeros(2, 200, dtype=torch.int32)
    first = builder.build(torch.tensor([5000, 10], dtype=torch.int32), table, 1).decode.plan
    before = first.clone()
    second = builder.build(torch.tensor([10, 5000], dtype=torch.int32), table, 1).decode.plan
    assert second is first
    assert not torch.equal(before, second)
    fresh_plan = mla_suite.plan(
        torch.tensor([10, 5000], dtype=torch.int32), num_heads=HEADS, num_sm_parts=8, max_seqlen_kv=0
    )
    assert torch.equal(second, fresh_plan)
    # As many sequences of more tokens: more rows, so fewer SM parts, and a plan of another size.
    drafted = builder.build(torch.tensor([10, 5000], dtype=torch.int32), table, 64).decode.plan
    assert drafted.shape != second.shape
    assert torch.equal(second, fresh_plan)


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
    builder = backend.get_builder_cls()(None, ["layer"], SimpleNamespace(heads=HEADS), "cpu")
    lens = torch.tensor([30, 9], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="decode one token per sequence"):
        builder.build(lens, torch.zeros(2, 4, dtype=torch.int32), 2, dcp=lens)


@pytest.fixture
def sglang(monkeypatch):
    backends = {}

    def register_attention_backend(name):
        return lambda factory: backends.setdefault(name, factory)

    class TritonAttnBackend:
        """Keeps the pools of the runner; `forward` sends decode steps to forward_decode."""

        def __init__(self, model_runner, skip_prefill=False, kv_indptr_buf=None):
            self.req_to_token = model_runner.req_to_token_pool.req_to_token
            self.token_to_kv_pool = model_runner.token_to_kv_pool
            self.enable_deterministic = model_runner.deterministic
            self.split_tile_size = 256 if model_runner.deterministic else None
            self.topk = 1

    choices, deterministic = ["triton"], ["triton"]
    server_args = ModuleType("sglang.srt.server_args")
    server_args.ATTENTION_BACKEND_CHOICES = choices
    server_args.add_attention_backend_choices = choices.extend
    server_args.add_deterministic_attention_backend_choices = deterministic.extend
    modules(
        monkeypatch,
        sglang__srt=dict(server_args=server_args),
        sglang__srt__layers__attention__attention_registry=dict(register_attention_backend=register_attention_backend),
        sglang__srt__layers__attention__triton_backend=dict(TritonAttnBackend=TritonAttnBackend),
    )
    module = fresh(monkeypatch, "mla_suite.integrations.sglang")
    monkeypatch.setitem(sys.modules, "mla_suite.integrations.sglang", module)
    module.stand_in_backends, module.stand_in_choices = backends, (choices, deterministic)
    return module


class Pool:
    """Two layers' caches as SGLang keeps them: [slots, 1, 576]."""

    def __init__(self, slots, dtype):
        self.layers = [torch.randn(slots, 1, WIDTH).to(dtype) for _ in range(2)]

    def get_key_buffer(self, layer_id):
        return self.layers[layer_id]

    def set_kv_buffer(self, layer, loc, k, v):
        self.layers[layer.layer_id][loc] = k.to(self.layers[0].dtype)

    def set_mla_kv_buffer(self, layer, loc, k, k_rope):
        self.set_kv_buffer(layer, loc, torch.cat((k, k_rope), dim=-1), None)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("page", "in_two", "dtype"),
    [
        (64, False, torch.bfloat16),
        (64, True, torch.bfloat16),
        (1, False, torch.bfloat16),
        (16, False, torch.float8_e4m3fn),
    ],
)
def test_sglang_steps(sglang, page, in_two, dtype, deterministic):
    lengths, context = [300, 9, 64], 384
    pool = Pool(1024 if page > 1 else 700, dtype)
    req_to_token = torch.full((5, context), 0, dtype=torch.int32)
    free = torch.randperm(len(pool.layers[0]) // page)
    rows, first = [4, 0, 2], 0
    for row, length in zip(rows, lengths, strict=True):
        count = -(-(length + 1) // page)
        slots = (free[first : first + count, None] * page + torch.arange(page)).flatten()[:context]
        req_to_token[row, : len(slots)] = slots.int()
        first += count
    runner = SimpleNamespace(
        use_mla_backend=True,
        page_size=page,
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
        token_to_kv_pool=pool,
        deterministic=deterministic,
    )
    backend = sglang.MLASuiteAttnBackend(runner)
    for step in range(2):  # a second token, with the batch's tensors updated in place, as a server's graph does
        now = [length + step for length in lengths]
        if step == 0:
            batch = SimpleNamespace(
                seq_lens=torch.tensor(now),
                seq_lens_cpu=torch.tensor(now),
                req_pool_indices=torch.tensor(rows),
                out_cache_loc=torch.zeros(3, dtype=torch.int64),
                forward_mode=SimpleNamespace(is_target_verify=lambda: False, is_extend=lambda: False),
            )
        batch.seq_lens.copy_(torch.tensor(now))
        batch.seq_lens_cpu.copy_(torch.tensor(now))
        ends = [req_to_token[row, length - 1] for row, length in zip(rows, now, strict=True)]
        batch.out_cache_loc.copy_(torch.stack(ends))
        for layer_id in range(2):
            layer = SimpleNamespace(
                layer_id=layer_id,
                tp_q_head_num=HEADS,
                head_dim=WIDTH,
                v_head_dim=LATENT,
                scaling=0.05,
                logit_cap=0.0,
                k_scale=torch.tensor(0.5) if dtype.itemsize == 1 else None,
            )
            q, k = torch.randn(3, HEADS, WIDTH).bfloat16(), torch.randn(3, 1, WIDTH).bfloat16()
            if in_two:
                out = backend.forward_decode(
                    q[..., :LATENT].flatten(1), k[..., :LATENT], k[..., :LATENT], layer, batch,
                    q_rope=q[..., LATENT:], k_rope=k[..., LATENT:],
                )  # fmt: skip
            else:
                out = backend.forward_decode(q.flatten(1), k, k[..., :LATENT], layer, batch)
            assert out.shape == (3, HEADS * LATENT)
            for b, (row, length) in enumerate(zip(rows, now, strict=True)):
                stored = pool.layers[layer_id]
                own = stored.view(torch.uint8)[req_to_token[row, :length].long(), 0]  # torch 2.9 does not index float8
                keys = own.view(stored.dtype).float()
                want, _ = attend(q[b], keys * (0.5 if dtype.itemsize == 1 else 1.0), 0.05)
                torch.testing.assert_close(out[b].view(HEADS, LATENT).float(), want, rtol=2**-8, atol=2e-5)
    assert (backend._plan is None) == deterministic


def test_sglang_refusals(sglang):
    with pytest.raises(ValueError, match="no latent attention"):
        sglang.MLASuiteAttnBackend(SimpleNamespace(use_mla_backend=False))
    backend = sglang.MLASuiteAttnBackend.__new__(sglang.MLASuiteAttnBackend)
    with pytest.raises(ValueError, match="scores are not capped"):
        backend.forward_decode(torch.zeros(1), None, None, SimpleNamespace(logit_cap=30.0), None)


def entry_point(group):
    """The function that this package's pyproject.toml ships in this group of entry points."""
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    (value,) = declared[group].values()
    return EntryPoint("mla_suite", value, group).load()


def test_the_shipped_entry_point_registers_with_vllm(vllm, monkeypatch):
    registered = {}
    registry = dict(AttentionBackendEnum=SimpleNamespace(CUSTOM="CUSTOM"), register_backend=registered.__setitem__)
    modules(monkeypatch, vllm__v1__attention__backends__registry=registry)
    entry_point("vllm.general_plugins")()
    module, _, name = registered["CUSTOM"].rpartition(".")
    assert getattr(fresh(monkeypatch, module), name).get_name() == "CUSTOM"


def test_the_shipped_entry_point_registers_with_sglang(sglang):
    register = entry_point("sglang.srt.plugins")
    for _ in range(2):
        register()
        assert sglang.stand_in_choices == (["triton", "mla_suite"], ["triton", "mla_suite"])
    (create,) = sglang.stand_in_backends.values()
    with pytest.raises(ValueError, match="MLASuiteAttnBackend: the model has no latent attention"):
        create(SimpleNamespace(use_mla_backend=False))


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
