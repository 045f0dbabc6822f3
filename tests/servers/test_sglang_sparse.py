"""Our sparse backend on SGLang's real one and its pool for models with an indexer: `tox -e sglang`.

Results are compared with attention in fp64 over the rows that SGLang's pool holds and the keys that were selected. The
indexer is not run here: its kernels are for GPUs.
"""

import contextlib
import functools
import math

import pytest
import sglang_classes
import sglang_sparse_classes as theirs
import torch
from observers import crossings
from sglang.srt.layers.attention import attention_registry, dsa_backend
from sglang.srt.layers.dcp.comm import cp_lse_ag_out_rs_mla
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import is_mla_dcp_lse_base_on_e
from sglang.srt.speculative.ngram_info import NgramVerifyInput

import mla_suite
from mla_suite import testing
from mla_suite.integrations import plugins
from mla_suite.integrations import sglang_sparse as integration
from mla_suite.kv_formats import cache as caches

HEADS, LATENT, WIDTH, PAGE, TOPK = theirs.HEADS, theirs.LATENT, theirs.WIDTH, theirs.PAGE, theirs.TOPK
LENGTHS, POOL_ROWS = [300, 9, 64], [4, 0, 2]
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The entry point has run; its changes to SGLang end with the test."""
    monkeypatch.setattr(dsa_backend, "DeepseekSparseAttnBackend", integration.DeepseekSparseAttnBackend)
    plugins.sglang()


@pytest.fixture
def decodes(monkeypatch):
    """The number of query tokens of every call of our sparse decode."""
    seen, decode = [], mla_suite.sparse_decode
    monkeypatch.setattr(
        mla_suite, "sparse_decode", lambda q, *args, **options: seen.append(len(q)) or decode(q, *args, **options)
    )
    return seen


@pytest.fixture
def prefills(monkeypatch):
    """The arguments of every call of SGLang's own kernel."""
    seen, base = [], integration.DeepseekSparseAttnBackend

    @functools.wraps(base._forward_flashmla_sparse)
    def noted(self, **given):
        seen.append(given)

    monkeypatch.setattr(base, "_forward_flashmla_sparse", noted)
    return seen


def filled(runner):
    """Give each request pages in random order and fill the pool with rows."""
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    free, pages = torch.randperm(pool.size // PAGE) + 1, theirs.CONTEXT // PAGE
    for i, row in enumerate(POOL_ROWS):
        table[row] = (free[i * pages : (i + 1) * pages, None] * PAGE + torch.arange(PAGE)).flatten().int()
    for buffer in pool.kv_buffer:
        rows = torch.randn(len(buffer) // PAGE, PAGE, LATENT + pool.qk_rope_head_dim)
        packed = caches.pack(record(pool), rows) if pool.dsa_kv_cache_store_fp8 else rows.to(pool.dtype)
        buffer.copy_(packed.view(buffer.dtype).reshape(buffer.shape))


@contextlib.contextmanager
def serving(monkeypatch, dtype=torch.bfloat16, *, model=(), **options):
    """(backend, runner) of a server that was started with `options`; the requests have pages, and the pool has rows."""
    with theirs.server(monkeypatch, **options):
        runner = theirs.runner(dtype, **dict(model))
        filled(runner)
        yield theirs.backend(runner), runner


def record(pool):
    return theirs.RECORDS[pool.qk_rope_head_dim][0]


def stored(runner, layer_id):
    """Keys [slots, width] in fp64; those of records are rounded to bf16."""
    pool = runner.token_to_kv_pool
    buffer = pool.kv_buffer[layer_id]
    if not pool.dsa_kv_cache_store_fp8:
        buffer = buffer.view(pool.dtype)
    else:
        buffer = caches.unpack(record(pool), buffer.view(-1, PAGE, buffer.shape[-1])).bfloat16()
    return buffer.view(len(pool.kv_buffer[layer_id]), -1).double()


def chosen(lengths, q_lens, topk, pool=1):
    """int32 [tokens, topk + pool - 1] positions: those of topk / pool pools of neighbours, and those behind the last
    whole pool, the token's own among them; -1 where a token sees fewer."""
    rows = []
    for length, q_len in zip(lengths, q_lens, strict=True):
        for seen in range(length - q_len + 1, length + 1):
            whole = torch.arange(seen // pool)
            pools = torch.cat((whole[-1:], whole[:-1][torch.randperm(max(len(whole) - 1, 0))[: topk // pool - 1]]))
            row = torch.cat(
                ((pools[:, None] * pool + torch.arange(pool)).flatten(), torch.arange(seen)[len(whole) * pool :])
            )
            rows.append(torch.nn.functional.pad(row, (0, topk + pool - 1 - len(row)), value=-1))
    return torch.stack(rows).int()


def assert_stored(keys, slots, k, dtype):
    # Triton's interpreter loses the carry where a value is rounded up to a power of two in e4m3, and halves it.
    bound = k[:, 0].double().abs() / 2 + 1e-3 if dtype == FP8 else 0
    assert ((keys[slots] - k[:, 0]).abs() <= bound).all()


def exact(q, keys, slots, scale, sink=None):
    """Attention in fp64 of one token's heads over the rows of `slots`, of which -1 are none."""
    own = keys[slots[slots >= 0].long()]
    sink = torch.full((HEADS,), -torch.inf) if sink is None else sink
    return testing.attention(q, own, torch.ones(HEADS, len(own), dtype=torch.bool), scale, LATENT, sink).out


def hold(runner, layer, slots, q, k, selected, out):
    """The new rows are stored, and every query token's result is that of fp64."""
    keys = stored(runner, layer.layer_id)
    assert_stored(keys, slots, k, runner.token_to_kv_pool.dtype)
    for token, row in enumerate(selected):
        want = exact(q[token], keys, row, layer.scaling)
        torch.testing.assert_close(out[token].double(), want, rtol=2**-7, atol=2e-4)


def step(backend, runner, mode, lengths, q_lens, *, in_two=True, captured=False, compare=hold):
    """One pass over both layers; `lengths` include the new tokens. `compare` sees a layer's arguments and result."""
    width = LATENT + runner.token_to_kv_pool.qk_rope_head_dim
    table = runner.req_to_token_pool.req_to_token
    owner = [row for row, q_len in zip(POOL_ROWS, q_lens, strict=True) for _ in range(q_len)]
    slots = torch.cat([table[row, n - q : n] for row, n, q in zip(POOL_ROWS, lengths, q_lens, strict=True)]).long()
    verify = mode.is_target_verify()
    counted = [n - q if verify else n for n, q in zip(lengths, q_lens, strict=True)]
    batch = theirs.batch(mode, counted, list(q_lens), POOL_ROWS, slots, sglang_classes.drafts())
    if captured:
        backend.init_forward_metadata_out_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    call = backend.forward_decode if mode.is_decode() else backend.forward_extend
    tokens = sum(q_lens)
    for layer_id in range(theirs.LAYERS):
        layer = theirs.layer(layer_id, width)
        q, k = torch.randn(tokens, HEADS, width).bfloat16(), torch.randn(tokens, 1, width).bfloat16()
        positions = chosen(lengths, q_lens, TOPK, backend.dsa_index_kpool)
        selected = torch.stack([table[row][p.long()] for row, p in zip(owner, positions, strict=True)])
        selected = torch.where(positions >= 0, selected, -1)
        options = dict(k_rope=k[..., LATENT:], topk_indices=selected if backend.use_fused_topk else positions)
        if in_two:
            options["q_rope"] = q[..., LATENT:]
        queries = q[..., :LATENT] if in_two else q
        out = call(queries.flatten(1), k[..., :LATENT], k[..., :LATENT], layer, batch, **options)
        compare(runner, layer, slots, q, k, selected, out)


@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("rope", theirs.RECORDS)
@pytest.mark.parametrize("fused", [True, False])
def test_decode(monkeypatch, decodes, fused, rope, dtype, in_two):
    with serving(monkeypatch, dtype, model=dict(qk_rope_head_dim=rope), fused=fused) as (backend, runner):
        assert type(backend) is integration.MLASuiteSparseAttnBackend
        for more in (0, 1):
            step(backend, runner, ForwardMode.DECODE, [n + more for n in LENGTHS], [1, 1, 1], in_two=in_two)
    assert decodes == [3] * 4


def test_plain_fp8_rows(monkeypatch, decodes):
    """As SGLang stores them where prefill is TRT-LLM's, and on ROCm: cast, and divided by nothing."""
    with serving(monkeypatch, FP8, model=dict(kv_cache_dim=WIDTH)) as served:
        step(*served, ForwardMode.DECODE, LENGTHS, [1, 1, 1])
    assert decodes == [3] * 2


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("fused", [True, False])
def test_four_drafts(monkeypatch, decodes, fused, dtype, mode):
    """Verification of drafts, and the draft layer's own pass over them."""
    with serving(monkeypatch, dtype, fused=fused) as served:
        step(*served, mode, LENGTHS, [theirs.DRAFTS] * 3)
    assert decodes == [12] * 2


def test_a_captured_decode_follows_its_tensors(monkeypatch, decodes):
    """SGLang updates metadata in place before each replay; the call that a graph holds reads them and no other."""
    with serving(monkeypatch, speculative_num_draft_tokens=None) as (backend, runner):
        backend.init_cuda_graph_state(max_bs=3, max_num_tokens=3)
        addresses = set()
        for more in (0, 1, 2):
            step(backend, runner, ForwardMode.DECODE, [n + more for n in LENGTHS], [1, 1, 1], captured=True)
            addresses.add(backend.forward_metadata.dsa_cache_seqlens_int32.data_ptr())
        assert len(addresses) == 1
    assert decodes == [3] * 6


POOL_KEYS = 4  # keys of one entry of GLM-5.3's index here; the model's is 16

CALLS = {"decode": [1, 1, 1], "target_verify": [theirs.DRAFTS] * 3, "extend": [8, 1, 3]}
"""Kinds of calls -> new tokens of each sequence."""


@pytest.mark.parametrize(("dtype", "call"), [
    *((torch.bfloat16, call) for call in ("decode", "target_verify")),  # prefill over 16-bit rows is SGLang's
    *((FP8, call) for call in CALLS),
])  # fmt: skip
def test_pools_of_keys_and_those_behind_them(monkeypatch, decodes, dtype, call):
    """GLM-5.3's selections are wider than topk. Prompts over its records are ours: no prefill of SGLang reads them."""
    mode, q_lens, make = ForwardMode[call.upper()], CALLS[call], torch.tensor
    # A CPU without a GPU has no pinned memory, in which SGLang lays out a prompt's plan.
    monkeypatch.setattr(torch, "tensor", lambda *given, pin_memory=False, **options: make(*given, **options))
    model = dict(qk_rope_head_dim=0, index_kpool=POOL_KEYS)
    with serving(monkeypatch, dtype, model=model) as served, forward_context(ForwardContext(attn_backend=served[0])):
        step(*served, mode, LENGTHS, q_lens)
    assert decodes == [sum(q_lens)] * 2


class Group:
    """The ranks that share a context, of which one speaks at a time; `rank_in_group` says which."""

    world_size = 2

    def __init__(self, lses):
        self.lses = lses

    def all_gather(self, lse, dim):
        assert torch.equal(lse, self.lses[self.rank_in_group])
        return torch.cat(self.lses, dim=dim)

    def reduce_scatter_along_dim(self, out, dim):
        return out  # the test adds up what the ranks bring


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_ranks_of_decode_context_parallelism_add_up(monkeypatch, decodes, dtype, call):
    """Each of two ranks holds the slots of its turn, in prompts as well, and SGLang's own merge makes them one."""
    mode, q_lens, results = ForwardMode[call.upper()], CALLS[call], []
    for rank in range(Group.world_size):
        torch.manual_seed(7)  # the ranks have the same queries, keys, page tables and selections
        with serving(monkeypatch, dtype, ranks=Group.world_size, rank=rank) as (backend, runner):
            table = runner.req_to_token_pool.req_to_token
            table.mul_(Group.world_size).add_(torch.arange(theirs.CONTEXT, dtype=torch.int32) % Group.world_size)
            results.append([])

            def keep(runner, layer, *given):
                results[-1].append((stored(runner, layer.layer_id), layer, *given))

            step(backend, runner, mode, LENGTHS, q_lens, compare=keep)
    for ours, others in zip(*results, strict=True):
        keys = torch.stack((ours[0], others[0]), dim=1).flatten(0, 1)
        _, layer, slots, q, k, selected, (out, lse) = ours
        assert torch.equal(q, others[3])
        assert torch.equal(selected, others[5])
        assert_stored(keys, slots, k, dtype)
        parts, lses = zip((out, lse), others[6], strict=True)
        group, merged = Group(lses), torch.zeros(HEADS, len(q), LATENT)
        for group.rank_in_group, (part, own) in enumerate(zip(parts, lses, strict=True)):
            base_on_e = is_mla_dcp_lse_base_on_e("dsa")
            merged += cp_lse_ag_out_rs_mla(part.float(), own, group, is_lse_base_on_e=base_on_e)
        for token, row in enumerate(selected):
            wrong = (merged[:, token] - exact(q[token], keys, row, layer.scaling)).abs()
            # Each rank's part is rounded to bf16 before the merge.
            shares = torch.stack([lse[token] for lse in lses]).mul(math.log(2)).softmax(0)[..., None]
            rounded = sum(share * part[token].abs() for share, part in zip(shares, parts, strict=True))
            assert (wrong <= 2**-8 * rounded + 2e-4).all()
    assert decodes == [sum(q_lens)] * 4


def test_slots_past_a_tokens_length_and_rows_without_one(monkeypatch):
    """A token's length bounds its slots; where lengths are of another count of tokens, -1 alone does."""
    with serving(monkeypatch) as (backend, runner):
        backend._decodes = True
        q = torch.randn(2, HEADS, WIDTH).bfloat16()
        slots = torch.arange(2 * TOPK, dtype=torch.int32).view(2, TOPK)
        slots[1, 1:] = -1

        def attend(lengths, attn_sink):
            cache = runner.token_to_kv_pool.get_key_buffer(0)
            call = dict(q_all=q, kv_cache=cache, v_head_dim=LATENT, page_table_1=slots, sm_scale=0.07)
            return backend._forward_flashmla_sparse(**call, topk_length=lengths, attn_sink=attn_sink)

        keys = stored(runner, 0)
        for lengths, counts in ((torch.tensor([5, 1]), (5, 1)), (torch.tensor([5]), (TOPK, 1)), (None, (TOPK, 1))):
            for given in (None, torch.randn(HEADS)):
                out = attend(None if lengths is None else lengths.int(), given).double()
                for token, count in enumerate(counts):
                    want = exact(q[token], keys, slots[token, :count], 0.07, given)
                    torch.testing.assert_close(out[token], want, rtol=2**-7, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_nothing_of_a_decode_crosses_between_host_and_device(monkeypatch, dtype):
    with serving(monkeypatch, dtype) as (backend, runner):
        backend._decodes = True
        cache = runner.token_to_kv_pool.get_key_buffer(0)
        given = [torch.empty(3, HEADS, WIDTH).bfloat16(), cache, torch.zeros(3, TOPK).int(), torch.zeros(3).int()]
        q, cache, slots, lengths = (tensor.to("meta") for tensor in given)
        call = dict(q_all=q, kv_cache=cache, v_head_dim=LATENT, page_table_1=slots, sm_scale=0.07, topk_length=lengths)
        assert crossings(lambda: backend._forward_flashmla_sparse(**call)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_prefill_stays_with_sglang(monkeypatch, decodes, prefills, dtype):
    """Prefill may end in the same method, between decodes."""
    with serving(monkeypatch, dtype) as (backend, runner):
        step(backend, runner, ForwardMode.DECODE, LENGTHS, [1, 1, 1])
        batch = theirs.batch(ForwardMode.EXTEND, LENGTHS, [8, 1, 3], POOL_ROWS, torch.arange(64, 76), None)
        monkeypatch.setattr(dsa_backend, "dequantize_k_cache_paged_dsa", lambda cache, slots: cache)
        backend.init_forward_metadata(batch)
        q, k = torch.randn(12, HEADS * WIDTH).bfloat16(), torch.randn(12, 1, WIDTH).bfloat16()
        options = dict(k_rope=k[..., LATENT:], topk_indices=torch.zeros(12, TOPK, dtype=torch.int32))
        backend.forward_extend(q, k[..., :LATENT], k[..., :LATENT], theirs.layer(0), batch, **options)
        (given,) = prefills
        assert given["q_all"].shape == (12, HEADS, WIDTH)
        assert given["topk_length"].shape == (12,)
        step(backend, runner, ForwardMode.DECODE, LENGTHS, [1, 1, 1])
    assert decodes == [3] * 4


def test_trees_of_drafts_are_refused_before_anything_is_written(monkeypatch, decodes):
    ragged = sglang_classes.drafts()
    ragged.ragged_verify_layout = object()
    ngram = NgramVerifyInput(custom_mask=torch.ones(1), draft_token_num=4)  # whose breadth of 1 is no chain
    with serving(monkeypatch) as (backend, runner):
        before = stored(runner, 0)
        q, k, rope = torch.randn(12, HEADS * WIDTH), torch.randn(12, 1, LATENT), torch.randn(12, 1, theirs.ROPE)
        for drafts in (sglang_classes.drafts(topk=4), ngram, ragged):
            slots = torch.arange(64, 76)
            batch = theirs.batch(ForwardMode.TARGET_VERIFY, LENGTHS, [4, 4, 4], POOL_ROWS, slots, drafts)
            backend.init_forward_metadata(batch)
            with pytest.raises(ValueError, match="the drafts are a tree, or sequences have different numbers of them;"):
                backend.forward_extend(q, k, k, theirs.layer(0), batch, k_rope=rope, topk_indices=slots[:, None])
        assert torch.equal(stored(runner, 0), before)
    assert decodes == []


@pytest.mark.parametrize(("change", "reason"), [
    (dict(qk_rope_head_dim=32), "rows are of 512 latent and 32 rope values; it takes 512 and 64, or 512 alone: choose"),
    (dict(device="xpu"), "the device is xpu; it takes GPUs of CUDA and ROCm: choose another --dsa-decode-backend"),
])  # fmt: skip
def test_servers_that_are_refused(monkeypatch, change, reason):
    with theirs.server(monkeypatch):
        runner = theirs.runner(torch.bfloat16, **change)
        if runner.device == "xpu":  # this torch has no such device, on which SGLang's constructor makes a tensor
            monkeypatch.setattr(torch, "arange", lambda *args, **options: None)
        with pytest.raises(ValueError, match=f"MLASuiteSparseAttnBackend: {reason}"):
            theirs.backend(runner)


def test_an_sglang_that_names_an_argument_otherwise_is_refused(monkeypatch):
    def renamed(self, q_all, kv_cache, v_head_dim, page_table, sm_scale):
        raise AssertionError

    monkeypatch.setattr(integration.DeepseekSparseAttnBackend, "_forward_flashmla_sparse", renamed)
    text = r"_forward_flashmla_sparse of SGLang 0.5.* takes no page_table_1; install"
    with pytest.raises(TypeError, match=text), serving(monkeypatch):
        pass


def test_options_that_are_not_known_are_refused(monkeypatch, decodes):
    with serving(monkeypatch) as (backend, _):
        backend._decodes = True
        call = dict(q_all=None, kv_cache=None, v_head_dim=LATENT, page_table_1=None, sm_scale=0.07)
        with pytest.raises(ValueError, match="MLASuiteSparseAttnBackend: window is given, which it does not know"):
            backend._forward_flashmla_sparse(**call, window=7)
    assert decodes == []


def test_other_decode_backends_stay_as_they_are(monkeypatch):
    with theirs.server(monkeypatch, dsa_decode_backend="flashmla_kv"):
        runner = theirs.runner(torch.bfloat16)
        for name in ("dsa", "nsa"):
            assert type(attention_registry.ATTENTION_BACKENDS[name](runner)) is integration.DeepseekSparseAttnBackend


@pytest.mark.parametrize("name", ["dsa", "nsa"])
def test_draft_layers_decode_with_it_too(monkeypatch, name):
    with theirs.server(monkeypatch):
        runner = theirs.runner(torch.bfloat16)
        target = attention_registry.ATTENTION_BACKENDS[name](runner)
        drafts = dsa_backend.DeepseekSparseAttnMultiStepBackend(runner, topk=1, speculative_num_steps=3)
    assert {type(backend) for backend in (target, *drafts.attn_backends)} == {integration.MLASuiteSparseAttnBackend}
