"""vLLM's own metadata for a V3.2 model, through our sparse backend, against the definition: `tox -e vllm`.

vLLM runs no sparse layer on a CPU, so its builder and its registry are called as its model runner calls them.
"""

import json
import warnings
from types import SimpleNamespace

import pytest
import sparse_problems
import tiny_deepseek
import torch
import vllm_cpu
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata, MLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import workspace
from vllm.v1.worker.utils import customize_attention_spec

import mla_suite
from mla_suite.integrations import plugins, vllm_widened
from mla_suite.integrations import vllm as dense
from mla_suite.integrations import vllm_sparse as integration
from mla_suite.integrations.vllm_sparse import RECORDS
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

HEADS, TOPK, PAGE, SCALE = 4, 16, 4, 96**-0.5
LAYER = "model.layers.0.self_attn.attn"


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek_v32")
    (folder / "config.json").write_text(json.dumps(tiny_deepseek.V32 | {"index_topk": TOPK}))
    settings = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=128, max_num_seqs=8, enforce_eager=True)
    config = EngineArgs(model=str(folder), **settings).create_engine_config()
    config.compilation_config.static_forward_context[LAYER] = SimpleNamespace(prefill_backend=None)
    return config


def metadata_of(vllm_config, q_lens, seq_lens, cache_dtype=None):
    """A step's metadata, made by the builder as vLLM's model runner asks for it."""
    sizes = dict(block_size=PAGE, num_kv_heads=1, head_size=576, dtype=torch.float32)
    spec = MLAAttentionSpec(**sizes, cache_dtype_str=cache_dtype)
    with set_current_vllm_config(vllm_config):
        builder = integration.MLASuiteSparseBackend.get_builder_cls()(spec, [LAYER], vllm_config, torch.device("cpu"))
        starts = torch.nn.functional.pad(torch.tensor(q_lens).cumsum(0), (1, 0)).int()
        width = -(-max(seq_lens) // PAGE)
        pages = torch.randperm(len(q_lens) * width).int().view(len(q_lens), width)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(q_lens),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(q_lens),
            max_seq_len=max(seq_lens),
            block_table_tensor=pages,
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
        )
        return builder.build(0, common)


def impl_of(vllm_config, indices, kv_cache_dtype="auto", rope=64):
    """One layer of our backend whose indexer has chosen `indices`."""
    sizes = dict(q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=rope, qk_head_dim=32 + rope)
    options = (None, None, kv_cache_dtype, None, "decoder", None)
    with set_current_vllm_config(vllm_config), pytest.MonkeyPatch.context() as patched:
        from vllm.model_executor.layers.attention import sparse_mla_attention

        patched.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1)
        return integration.MLASuiteSparseImpl(
            HEADS, 512 + rope, SCALE, 1, *options, **sizes, v_head_dim=32, kv_b_proj=None, topk_indices_buffer=indices
        )


def chosen(q_lens, seq_lens):
    """int32 [tokens, TOPK]: positions before each token, some repeated by none, -1 where there are fewer."""
    rows = []
    for q_len, kv_len in zip(q_lens, seq_lens, strict=True):
        for token in range(q_len):
            seen = kv_len - q_len + token + 1
            row = torch.randperm(seen)[:TOPK]
            rows.append(torch.nn.functional.pad(row, (0, TOPK - len(row)), value=-1))
    return torch.stack(rows).int()


def exact(q, keys, block_table, owner, indices):
    """The definition in fp64: attention to the chosen positions of each token's own sequence, and its lse."""
    positions = indices.clamp(min=0).long()
    slots = block_table[owner[:, None], positions // PAGE] * PAGE + positions % PAGE
    given = q, [keys.float()], [torch.where(indices >= 0, slots, -1)], [None], [None], None
    return sparse_problems.exact(*given, kv_formats=["fp32"], softmax_scale=SCALE, rounded=False)[:2]


def write(impl, rows, cache, cache_dtype, k_scale):
    """Write rows from slot 0 on as vLLM's layer does, with the arguments of its release."""
    layer = SimpleNamespace(
        impl=impl, hisparse_cache=None, use_pcp=False, pcp_shard_decode_requests=False, _k_scale_float=k_scale
    )
    slots = torch.arange(len(rows))
    MLAAttention.update_kv_cache(
        layer, rows[:, :512], rows[:, None, 512:], cache, slots, None, cache_dtype, torch.tensor([k_scale])
    )


def kv_format_of(cache_dtype, rope):
    return {"fp8_ds_mla": {64: "v32", 0: "v32_nope"}[rope], "fp8": "fp8", "auto": "fp32"}[cache_dtype]


def refuses_parts(parts, taken):
    assert not taken
    return torch.cat(parts, dim=-1)


STEPS = {"one token each": ([1, 1, 1], [30, 3, 17]), "drafts and a prompt": ([3, 1, 9], [30, 16, 9])}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla", "fp8"])
@pytest.mark.parametrize(("rope", "in_parts"), [(64, False), (64, True), (0, True)])
def test_results_are_the_definitions(vllm_config, monkeypatch, step, cache_dtype, rope, in_parts):
    """`in_parts`: kernels read both parts of queries where they lie, where there are two."""
    monkeypatch.setattr(integration, "takes_query_parts", lambda like, num_heads, q_len: in_parts)
    taken = in_parts and rope > 0 and cache_dtype != "auto"
    monkeypatch.setattr(integration, "joined", lambda *parts: refuses_parts(parts, taken))
    q_lens, seq_lens = STEPS[step]
    metadata = metadata_of(vllm_config, q_lens, seq_lens)
    owner = torch.repeat_interleave(torch.arange(len(q_lens)), torch.tensor(q_lens))
    assert metadata.req_id_per_token.tolist() == owner.tolist()
    indices = chosen(q_lens, seq_lens)
    impl = impl_of(vllm_config, indices, cache_dtype, rope)
    num_pages = metadata.block_table.numel()
    kind = get_kv_format(kv_format_of(cache_dtype, rope)).sized(512, rope)
    cache, k_scale = caches.empty(kind, num_pages, PAGE), 0.25 if cache_dtype == "fp8" else torch.nan
    if cache_dtype == "fp8":
        cache = cache.view(torch.uint8)  # as vLLM allocates it
    given = torch.randn(num_pages * PAGE, 512 + rope)
    write(impl, given, cache, cache_dtype, k_scale)
    keys = caches.unpack(kind, cache, descale=torch.tensor([k_scale]) if cache_dtype == "fp8" else None)
    keys = keys.float() if kind.dense else keys.bfloat16().float()  # records' keys are defined as rounded
    torch.testing.assert_close(keys.flatten(0, 1), given, rtol=2**-4, atol=2**-6)
    q = torch.randn(len(owner), HEADS, 512 + rope)
    layer = SimpleNamespace(_k_scale=torch.tensor(k_scale))
    out, lse = impl.forward_mqa(q.split([512, rope], dim=-1), cache, metadata, layer)
    expected, expected_lse = exact(q, keys, metadata.block_table, owner, indices)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize(
    ("q_lens", "seq_lens", "widened"),
    [
        ([1, 1, 9, 20], [30, 3, 60, 20], [2]),  # both prompts together
        ([12, 2, 9], [100, 70, 88], [1, 1]),  # two tokens do not pay for their 72 rows
        ([1, 1, 9], [30, 3, 120], []),
    ],
    ids=["beside decodes", "one is not worth it", "none is"],
)
def test_prompts_over_records_select_from_rows_in_bf16(vllm_config, monkeypatch, q_lens, seq_lens, widened, rope):
    """10 rows for each token, in a workspace of 128 tokens."""
    monkeypatch.setattr(integration, "widened_rows", lambda like, num_heads: 10)
    monkeypatch.setattr(vllm_config.model_config, "dtype", torch.bfloat16)
    monkeypatch.setattr(vllm_widened, "LARGEST_PAGE", PAGE)
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(torch.device("cpu")))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is no allocator of a GPU here
    convert, calls = mla_suite.convert_kv, []
    monkeypatch.setattr(mla_suite, "convert_kv", lambda *args, **names: calls.append(args) or convert(*args, **names))
    metadata = metadata_of(vllm_config, q_lens, seq_lens, RECORDS)
    assert [len(prompts.table) for prompts in metadata.widened] == widened
    indices = chosen(q_lens, seq_lens)
    impl = impl_of(vllm_config, indices, RECORDS, rope)
    kind = get_kv_format(kv_format_of(RECORDS, rope))
    cache = caches.pack(kind, torch.randn(metadata.block_table.numel(), PAGE, 512 + rope))
    keys = caches.unpack(kind, cache).bfloat16()
    owner = torch.repeat_interleave(torch.arange(len(q_lens)), torch.tensor(q_lens))
    q = torch.randn(len(owner), HEADS, 512 + rope).bfloat16()
    out, lse = impl.forward_mqa(q, cache, metadata, None)
    assert len(calls) == len(widened)
    monkeypatch.setattr(integration, "takes_query_parts", lambda like, num_heads, q_len: True)
    again = impl.forward_mqa(q.split([512, rope], dim=-1), cache, metadata, None)
    assert all(map(torch.equal, again, (out, lse)))
    with monkeypatch.context() as microbatches:
        microbatches.setattr(vllm_config.parallel_config, "enable_dbo", True)
        assert metadata_of(vllm_config, q_lens, seq_lens, RECORDS).widened == []
    expected, expected_lse = exact(q, keys, metadata.block_table, owner, indices)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleave", [1, PAGE])
def test_ranks_of_decode_context_parallelism_add_up(vllm_config, interleave):
    """Each of two ranks attends to the positions it holds; merged by lse they are the whole."""
    q_lens, seq_lens, ranks = [1, 2], [30, 18], 2
    metadata = metadata_of(vllm_config, q_lens, seq_lens)
    indices = chosen(q_lens, seq_lens)
    indices[0] = torch.where(indices[0] // interleave % ranks == 1, indices[0], -1)  # rank 0 has none of these
    owner = torch.tensor([0, 1, 1])
    rows = torch.randn(len(q_lens), 32, 576)
    q = torch.randn(3, HEADS, 576)
    parts = []
    for rank in range(ranks):
        position = torch.arange(32)
        held = position[position // interleave % ranks == rank]
        width = metadata.block_table.shape[1]
        cache = torch.full((metadata.block_table.numel(), PAGE, 576), torch.nan)
        for sequence in range(len(q_lens)):
            for local, place in enumerate(held.tolist()):
                if local < width * PAGE:
                    cache[metadata.block_table[sequence, local // PAGE], local % PAGE] = rows[sequence, place]
        impl = impl_of(vllm_config, indices)
        impl.dcp_world_size, impl.dcp_rank = ranks, rank
        metadata.cp_kv_cache_interleave_size = interleave
        parts.append(impl.forward_mqa(q, cache, metadata, None))
    lse = torch.stack([part[1] for part in parts])
    assert (lse[0, 0] == -torch.inf).all()
    weights = lse.softmax(0)
    out = sum(weight[..., None] * part[0] for weight, part in zip(weights, parts, strict=True))
    table = torch.arange(len(q_lens) * 8).view(len(q_lens), 8)
    expected, expected_lse = exact(q, rows.view(-1, PAGE, 576), table, owner, indices)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.logsumexp(0).double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_a_batch_invariant_token_has_the_same_bits_alone(vllm_config, monkeypatch):
    q_lens, seq_lens = [1, 1, 1], [30, 3, 17]
    metadata = metadata_of(vllm_config, q_lens, seq_lens)
    indices = chosen(q_lens, seq_lens)
    cache, q = torch.randn(metadata.block_table.numel(), PAGE, 576), torch.randn(3, HEADS, 576)
    monkeypatch.setattr(integration, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    together, _ = impl_of(vllm_config, indices).forward_mqa(q, cache, metadata, None)
    metadata.req_id_per_token = metadata.req_id_per_token[2:]
    alone, _ = impl_of(vllm_config, indices[2:]).forward_mqa(q[2:], cache, metadata, None)
    assert torch.equal(alone, together[2:])


def test_registration():
    for _ in range(2):  # a process may load its plugins twice
        plugins.vllm()
    assert AttentionBackendEnum["MLA_SUITE_SPARSE"].get_class() is integration.MLASuiteSparseBackend


DENSE = dense.MLASuiteBackend, dict(kv_cache_dtype="fp8", block_size=16, use_sparse=False)
SPARSE = integration.MLASuiteSparseBackend, dict(kv_cache_dtype="fp8_ds_mla", block_size=64, use_sparse=True)


@pytest.mark.parametrize(
    ("asked", "change", "reason"),
    [
        (DENSE, dict(use_pcp=True), "PCP not supported"),
        (DENSE, dict(has_sink=True), "attention sinks not supported"),
        (DENSE, dict(has_sliding_window=True), "sliding window not supported"),
        (DENSE, dict(use_sparse=True), "sparse not supported"),
        (DENSE, dict(use_non_causal=True), "non-causal attention not supported"),
        (SPARSE, dict(use_pcp=True), "PCP not supported"),
        (SPARSE, dict(has_sink=True), "attention sinks not supported"),
        (SPARSE, dict(use_sparse=False), "non-sparse not supported"),
        (SPARSE, dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype not supported"),
        (SPARSE, dict(head_size=320), "head_size not supported"),
    ],
)
def test_what_vllms_selector_is_told(asked, change, reason):
    """The reasons that vLLM's own check finds against a backend, with everything on that it supports, and without."""
    backend, options = asked
    for taken in ({}, dict(head_size=512) if asked is SPARSE else {}):
        assert backend.validate_configuration(**vllm_cpu.ASKED | options | taken) == []
    assert reason in backend.validate_configuration(**vllm_cpu.ASKED | options | change)


def layers_cache(rope, cache_dtype="fp8_ds_mla"):
    """vLLM's description of a layer's cache, as its model runner asks for it."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16), cache_config=SimpleNamespace(block_size=64)
    )
    layer = SimpleNamespace(kv_cache_dtype=cache_dtype, head_size=512 + rope, sliding_window=None)
    layer.topk_buffer_width, layer.indexer, layer.non_causal_multi_token_decode = TOPK, None, False
    spec = MLAAttention.get_kv_cache_spec(layer, config)
    return customize_attention_spec(integration.MLASuiteSparseBackend, spec)


def test_records_without_rope_values_have_no_room_for_them():
    assert layers_cache(rope=64).page_size_bytes == 64 * 656
    assert layers_cache(rope=0).page_size_bytes == 64 * get_kv_format("v32_nope").token_bytes
    assert layers_cache(rope=0, cache_dtype="bfloat16").page_size_bytes == 64 * 512 * 2


def test_prompts_over_records_that_vllms_gather_does_not_read_are_not_prefilled_densely(vllm_config):
    indices = torch.zeros(1, TOPK, dtype=torch.int32)
    dense = [impl_of(vllm_config, indices, dtype, rope) for dtype, rope in (("fp8_ds_mla", 64), ("auto", 0))]
    assert all(impl.supports_dense_mha_prefill for impl in dense)
    assert not impl_of(vllm_config, indices, "fp8_ds_mla", 0).supports_dense_mha_prefill
    with pytest.raises(NotImplementedError, match="rows are of 512 latent and 32 rope values; it takes 512 and 64, or"):
        impl_of(vllm_config, indices, "auto", 32)


BACKENDS = [(dense, dense.MLASuiteBackend), (integration, integration.MLASuiteSparseBackend)]


@pytest.fixture(params=BACKENDS, ids=["dense", "sparse"])
def unchecked(request):
    """A backend as vLLM finds it in a process of its own: its interface has not been checked."""
    module, backend = request.param
    module._check_interface.cache_clear()
    yield backend
    module._check_interface.cache_clear()


def test_this_vllm_is_one_that_the_backends_were_made_for(unchecked):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert issubclass(unchecked.get_impl_cls(), MLAAttentionImpl)


def test_a_vllm_that_names_an_argument_otherwise_is_refused(unchecked, monkeypatch):
    def renamed(self, kv_c_normed, k_pe, kv_cache, slots, kv_cache_dtype, k_scale):
        raise AssertionError

    monkeypatch.setattr(MLAAttentionImpl, "do_kv_cache_update", renamed)
    with pytest.raises(
        TypeError, match=r"do_kv_cache_update of vLLM .* takes no slot_mapping; install vLLM 0.25 to 0.33"
    ):
        unchecked.get_impl_cls()


def test_options_that_it_has_not_are_refused(vllm_config, monkeypatch):
    # vLLM's own check of this field wants a GPU, so the field is there for our builder alone.
    monkeypatch.setattr(integration.SparseMLACommonMetadataBuilder, "__init__", lambda *_: None)
    asked = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config={}))
    with pytest.raises(NotImplementedError, match="hisparse_config is set; keys are read from the GPU's cache alone"):
        integration.MLASuiteSparseMetadataBuilder(None, [LAYER], asked, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="MLASuiteSparseImpl: sliding_window is set"):
        integration.MLASuiteSparseImpl(HEADS, 576, SCALE, 1, None, 128, "auto", None, "decoder", None)
