"""Layers of our dense backend on metadata of our builder, against the definition: `tox -e vllm`.

An engine on a CPU has neither fp8 queries nor drafts that a device moves, and asks for no long context. So the layers
are vLLM's own classes, and a step's metadata is made as vLLM's builder asks for it.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

import mla_suite
from mla_suite import archs, integrations, testing
from mla_suite.distributed import KeyShard
from mla_suite.integrations import vllm as integration
from mla_suite.integrations import vllm_step
from mla_suite.ops.plan import scheduler
from mla_suite.ops.plan.metadata import Plan, Word

HEADS, LATENT, WIDTH, SCALE = 8, 512, 576, 0.05


def impl_of(kv_cache_dtype="auto", num_heads=HEADS):
    options = (None, None, kv_cache_dtype, None, "decoder", None)
    sizes = dict(q_lora_rank=32, kv_lora_rank=LATENT, qk_nope_head_dim=32, qk_rope_head_dim=64, qk_head_dim=96)
    with set_current_vllm_config(VllmConfig()):
        return integration.MLASuiteImpl(num_heads, WIDTH, SCALE, 1, *options, **sizes, v_head_dim=32, kv_b_proj=None)


def step_of(lengths, table, q_lens, dcp=None, moved=None, threshold=8, interleave=1, padding=0, **later):
    """A step's metadata. moved: query lengths on the device, where drafts may be moved there; padding: more tokens"""
    builder = integration.MLASuiteMetadataBuilder.__new__(integration.MLASuiteMetadataBuilder)
    builder.reorder_batch_threshold, builder.cp_kv_cache_interleave_size = threshold, interleave
    builder._adaptive, builder._most_drafts = moved is not None, min(threshold, 8)
    counted, on_device = (
        torch.nn.functional.pad(torch.tensor(lens).cumsum(0), (1, 0)).int() for lens in (q_lens, moved or q_lens)
    )
    decode = builder._build_decode(
        block_table_tensor=table,
        seq_lens_device=torch.as_tensor(lengths, dtype=torch.int32),
        max_seq_len=int(max(lengths)),
        query_start_loc_cpu=counted,
        query_start_loc_device=on_device,
        num_decode_tokens=sum(q_lens) + padding,
        dcp_tot_seq_lens_device=dcp,
        **later,
    )
    return SimpleNamespace(num_decodes=len(q_lens), decode=decode)


def layer_of(scale=1.0, q_scale=1.0):
    return SimpleNamespace(_k_scale=torch.tensor(scale), _q_scale=torch.tensor(q_scale))


def paged(lengths, page, dtype=torch.bfloat16):
    """A cache of random rows, and the table of sequences in it."""
    counts = [-(-n // page) for n in lengths]
    pages = (torch.randperm(sum(counts)) + 1).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    return torch.randn(sum(counts) + 1, page, WIDTH).to(dtype), table


def assert_attended(found, q, q_lens, cache, table, lengths, tolerance):
    """Each query token's result and lse are those of its sequence's keys in the cache."""
    starts = torch.nn.functional.pad(torch.tensor(q_lens).cumsum(0), (1, 0)).int()
    given = q.float(), cache.float(), torch.tensor(lengths).int(), table
    want = testing.exact_decode(*given, cu_seqlens_q=starts, softmax_scale=SCALE, kv_format="fp32")
    tokens = sum(q_lens)
    assert found[0].shape == (tokens, HEADS, LATENT)
    torch.testing.assert_close(found[0].double(), want.out[:tokens], **tolerance)
    torch.testing.assert_close(found[1].double(), want.lse[:tokens], rtol=1e-5, atol=1e-5)


ROUNDED = dict(rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [2, 2, 2], [1, 1, 4]], ids=str)
@pytest.mark.parametrize("by_head", [False, True])
def test_the_two_parts_of_queries(monkeypatch, by_head, q_lens, taken):
    """By token, as vLLM 0.33 makes the latent one, or by head, and a slice of wider rows. They are joined only where no
    kernel takes them so."""
    lengths = [300, 9, 64]
    cache, table = paged(lengths, 16)
    latent = torch.randn(HEADS, sum(q_lens), LATENT).bfloat16().transpose(0, 1)
    latent = latent if by_head else latent.contiguous()
    rope = torch.randn(sum(q_lens), HEADS, 96).bfloat16()[..., 32:]
    given = []
    monkeypatch.setattr(integration, "takes_query_parts", lambda like, heads, q_len: taken)
    monkeypatch.setattr(
        mla_suite, "decode", lambda *args, real=mla_suite.decode, **kw: given.append(kw) or real(*args, **kw)
    )
    found = impl_of().forward_mqa((latent, rope), cache, step_of(lengths, table, q_lens), layer_of())
    assert_attended(found, torch.cat((latent, rope), -1).float(), q_lens, cache.float(), table, lengths, ROUNDED)
    assert [call["q_rope"] is not None for call in given] == [taken]
    assert not taken or given[0]["q_rope"].untyped_storage().data_ptr() == rope.untyped_storage().data_ptr()


@pytest.mark.parametrize("scale", [0.25, 1.0])
@pytest.mark.parametrize(("dtype", "q_scale"), [(torch.float8_e4m3fn, 0.5), (torch.bfloat16, 1.0)], ids=str)
@pytest.mark.parametrize("q_len", [1, 4])
def test_an_fp8_cache_and_queries_that_vllm_quantised(q_len, dtype, q_scale, scale):
    lengths = [300, 9, 64]
    cache, table = paged(lengths, 16, torch.float8_e4m3fn)
    metadata = step_of(lengths, table, [q_len] * 3)
    q = torch.randn(3 * q_len, HEADS, WIDTH).to(dtype)
    found = impl_of("fp8").forward_mqa(q, cache.view(torch.uint8), metadata, layer_of(scale, q_scale))
    assert found[0].dtype == torch.bfloat16
    assert_attended(found, q.float() * q_scale, [q_len] * 3, cache.float() * scale, table, lengths, ROUNDED)


@pytest.mark.parametrize(
    ("arch", "heads", "asked", "change"),
    [
        ("gfx950", 16, True, {}),
        ("gfx950", 16, False, dict(dtype=torch.float16)),  # results would have another type than the model
        ("gfx942", 128, True, {}),
        ("sm_90", 128, True, {}),
        ("sm_90", 64, False, {}),
        ("sm_90", 32, True, dict(drafts=3)),
        # pages whose scores may be sums of fp8
        ("sm_90", 64, True, dict(page=64, precision="fp8")),
        ("sm_90", 64, False, dict(page=16, precision="fp8")),
        ("sm_90", 128, True, dict(page=16, precision="fp8")),
        ("sm_90", 64, True, dict(precision="fp8")),
    ],
)
def test_vllm_is_asked_for_fp8_queries_where_they_are_faster(monkeypatch, arch, heads, asked, change):
    # vLLM's default page size is replaced by the backend's own after layers are made.
    page, drafts = change.get("page"), change.get("drafts")
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=change.get("dtype", torch.bfloat16)),
        cache_config=SimpleNamespace(block_size=page or 16, user_specified_block_size=page is not None),
        speculative_config=drafts and SimpleNamespace(num_speculative_tokens=drafts),
    )
    monkeypatch.setattr(integration, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(integrations, "current_arch", lambda tensor: archs.get(arch))
    monkeypatch.setattr(integrations, "PRECISION", change.get("precision", integrations.PRECISION))
    assert impl_of("fp8", heads).supports_quant_query_input is asked


@pytest.mark.parametrize(
    ("arch", "bf16", "fp8", "narrow", "many_heads", "few_heads"),
    [("sm_90", 384, 192, 384, 170, 70), ("gfx942", 0, 0, 0, 0, 0), (None, 0, 0, 0, 0, 0)],
)
def test_which_prompts_gain_where(monkeypatch, arch, bf16, fp8, narrow, many_heads, few_heads):
    """By absorbed weights, with rows that there are native kernels for, and by records that are turned into bf16."""
    monkeypatch.setattr(integrations, "current_arch", lambda tensor: arch and archs.get(arch))
    here = torch.empty(0)
    assert integrations.absorbed_prompt(here, WIDTH, fp8=False) == bf16
    assert integrations.absorbed_prompt(here, WIDTH, fp8=True) == fp8
    assert integrations.absorbed_prompt(here, 320, fp8=False) == narrow
    assert integrations.absorbed_prompt(here, 400, fp8=False) == 0
    assert integrations.widened_rows(here, 32) == many_heads
    assert integrations.widened_rows(here, 31) == few_heads


@pytest.mark.parametrize(
    ("change", "threshold"),
    [
        ({}, 384),
        (dict(cache_dtype="fp8"), 192),
        (dict(head_size=400), 8),
        (dict(use_ubatching=True), 8),
        (dict(enable_adaptive_verification=True), 8),
        (dict(ranks=2), 8),
        (dict(invariant=True), 1),
    ],
    ids=str,
)
def test_how_long_a_prompt_may_be(monkeypatch, change, threshold):
    """vLLM orders the sequences of a step by this; whether such prompts gain is asked in each step."""

    def of_vllm(self, *_, **__):
        self.dcp_world_size, self.cp_kv_cache_interleave_size = change.get("ranks", 1), 1

    monkeypatch.setattr(integration.MLACommonMetadataBuilder, "__init__", of_vllm)
    monkeypatch.setattr(integrations, "current_arch", lambda tensor: archs.get("sm_90"))
    envs = SimpleNamespace(VLLM_BATCH_INVARIANT=change.get("invariant", False))
    monkeypatch.setattr(integration, "envs", envs)
    adaptive = change.get("enable_adaptive_verification", False)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(enable_adaptive_verification=adaptive),
        parallel_config=SimpleNamespace(use_ubatching=change.get("use_ubatching", False)),
        cache_config=SimpleNamespace(cache_dtype=change.get("cache_dtype", "auto")),
    )
    spec = SimpleNamespace(head_size=change.get("head_size", WIDTH))
    builder = integration.MLASuiteMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    assert builder.reorder_batch_threshold == threshold


@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 3, 3], [4, 1, 4]], ids=str)
def test_invariant_partials_follow_the_lengths(monkeypatch, q_lens):
    """A table as wide as the longest context costs no memory in an eager step, and no bits anywhere: a sequence has the
    same alone."""
    monkeypatch.setattr(integration, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    lengths, context = [2100, 9, 1025], 2**17
    cache, table = paged(lengths, 64)
    wide = torch.nn.functional.pad(table, (0, context // 64 - table.shape[1]))
    q, q_len, found = torch.randn(sum(q_lens), HEADS, WIDTH).bfloat16(), max(q_lens), {}
    for captured in (False, True):
        monkeypatch.setattr(integration, "capturing", lambda tensor, captured=captured: captured)
        metadata = step_of(lengths, wide, q_lens, threshold=q_len)
        results = impl_of().forward_mqa(q, cache, metadata, layer_of())
        found[captured] = *results, Plan.read(metadata.decode.plan).header[Word.WORK_TILE_CAPACITY]
    split_size = mla_suite.batch_invariant_split_size(HEADS, q_len)
    assert found[False][2] == 3 * -(-2100 // split_size), "the splits that 2100 keys need"
    assert found[True][2] == 3 * context // split_size, "a captured step serves every later length"
    last = slice(sum(q_lens) - q_len, None)
    alone = impl_of().forward_mqa(q[last], cache, step_of(lengths[2:], table[2:], [q_len], threshold=q_len), layer_of())
    for eager, captured, own in zip(found[False], found[True], alone, strict=False):
        assert torch.equal(eager, captured)
        assert torch.equal(eager[last], own)


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_invariant_steps_with_empty_sequences_and_padding(monkeypatch, padding):
    """Tokens belong to the sequences that the starts name, also where there are as many of both, or twice as many."""
    monkeypatch.setattr(integration, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    lengths, q_lens = [300, 9, 64], [1, 0, 1]
    cache, table = paged(lengths, 16)
    metadata = step_of(lengths, table, q_lens, threshold=1, padding=padding, max_query_len=1)
    q = torch.randn(2 + padding, HEADS, WIDTH).bfloat16()
    found = impl_of().forward_mqa(q, cache, metadata, layer_of())
    assert_attended([part[:2] for part in found], q, q_lens, cache, table, lengths, ROUNDED)


@pytest.mark.parametrize("later", [{}, {"max_query_len": 5}], ids=["before 0.31", "since 0.31"])
@pytest.mark.parametrize("moved", [None, [5, 1, 2]], ids=["as counted", "moved"])
@pytest.mark.parametrize("tile_rows", [64, HEADS], ids=["packed", "by token"])
def test_query_lengths_that_vary(monkeypatch, tile_rows, moved, later):
    """Drafts that the device moved between sequences count as the device has them, in a tile of rows and in several."""
    monkeypatch.setattr(scheduler, "TILE_ROWS", tile_rows)
    lengths, counted = [300, 9, 64], [3, 1, 4]
    cache, table = paged(lengths, 16)
    metadata = step_of(lengths, table, counted, moved=moved, **later)
    assert metadata.decode.max_seqlen_q == ((5 if later else 8) if moved else 4)
    q = torch.randn(8, HEADS, WIDTH).bfloat16()
    found = impl_of().forward_mqa(q, cache, metadata, layer_of())
    assert_attended(found, q, moved or counted, cache, table, lengths, ROUNDED)
    assert Plan.read(metadata.decode.plan).header[Word.BATCH] == (3 if tile_rows == 64 else 8)


@pytest.mark.parametrize(
    ("q_lens", "decodes"),
    [([1, 3, 20, 2], 2), ([1, 1, 12, 12], 2), ([9], 0), ([12, 4], 0), ([3, 3, 3], 3), ([1, 9, 0], 1)],
    ids=str,
)
@pytest.mark.parametrize("padding", [0, 3])
def test_short_prompts_are_a_call_of_their_own(monkeypatch, q_lens, decodes, padding):
    """No plan is made for them, whose row tiles would be every sequence's; the others have theirs."""
    calls = []
    decode = mla_suite.decode
    monkeypatch.setattr(mla_suite, "decode", lambda *a, **k: calls.append((a[0], a[2], k)) or decode(*a, **k))
    lengths = [300, 40, 64, 20][: len(q_lens)]
    cache, table = paged(lengths, 16)
    metadata = step_of(lengths, table, q_lens, threshold=64, padding=padding, max_query_len=max(q_lens))
    tokens = sum(q_lens)
    q = torch.randn(tokens + padding, HEADS, WIDTH).bfloat16()
    found = impl_of().forward_mqa(q, cache, metadata, layer_of())
    assert [part.shape[0] for part in found] == [tokens + padding] * 2
    assert_attended([part[:tokens] for part in found], q, q_lens, cache, table, lengths, ROUNDED)
    of_each = [(lens.tolist(), options["plan"] is not None, options["max_seqlen_q"]) for _, lens, options in calls]
    wanted = [(lengths[:decodes], True, max(q_lens[:decodes], default=0)), (lengths[decodes:], False, max(q_lens))]
    assert of_each == [call for call in wanted if call[0]]
    assert all(options["max_seqlen_kv"] == (0 if options["plan"] is not None else 300) for _, _, options in calls)


@pytest.mark.parametrize(
    ("q_lens", "context", "gain"),
    [
        ([1, 1, 1], [400, 9, 30], False),  # no prompt
        ([1, 8], [400, 9], False),
        ([50], [16384], True),
        ([64], [16384], False),  # its own tokens see each other besides
        ([1, 1, 50], [9, 9, 16384], True),
        ([50], [0], False),  # nothing is expanded that need not be
        ([50, 40], [1000, 0], True),
        ([50, 60, 60, 60], [100, 0, 0, 0], False),
        ([100, 50], [16384, 16384], False),  # the second stands behind one that is expanded
        ([50, 100], [16384, 0], True),
    ],
    ids=str,
)
def test_prompts_that_gain_by_absorbed_weights(q_lens, context, gain):
    """With 64 as the query tokens for which a key costs as much absorbed as expanded."""
    starts = torch.nn.functional.pad(torch.tensor(q_lens).cumsum(0), (1, 0)).int()
    lens = torch.tensor(context, dtype=torch.int32) + torch.tensor(q_lens, dtype=torch.int32)
    step = SimpleNamespace(query_start_loc_cpu=starts, max_query_len=max(q_lens), seq_lens_cpu_upper_bound=lens)
    assert vllm_step.prompts_gain(step, 8, 64) is gain
    step.seq_lens_cpu_upper_bound = None
    assert not vllm_step.prompts_gain(step, 8, 64)


@pytest.mark.parametrize(("q_lens", "interleave"), [([1, 1], 1), ([3, 3], 16), ([1, 4], 16)], ids=str)
def test_decode_context_parallelism(q_lens, interleave):
    """Two ranks with the keys dealt in turn, of which one may have none: natural lse merges them into the whole."""
    lengths, page = [301, 5], 16
    totals = torch.tensor(lengths, dtype=torch.int32)
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
        metadata = step_of(shard.local_lens(totals), table, q_lens, dcp=totals, interleave=interleave)
        impl = impl_of()
        impl.dcp_world_size, impl.dcp_rank = 2, rank
        parts.append(impl.forward_mqa(q, own_cache, metadata, layer_of()))
    lse = torch.stack([part[1] for part in parts])
    merged = (torch.stack([part[0] for part in parts]) * lse.softmax(0)[..., None]).sum(0)
    assert_attended((merged, lse.logsumexp(0)), q, q_lens, cache, table, lengths, dict(rtol=1e-4, atol=1e-5))
