"""Our backend on SGLang's real Triton backend and pool of latents: `tox -e sglang`.

Results are compared with attention in fp64 over the rows that SGLang's pool holds. Calls of our decode are counted, and
SGLang's own extend is replaced by one that says so, since its Triton kernels need a GPU.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import sglang_classes as theirs
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput

import mla_suite
from mla_suite.integrations import interface
from mla_suite.integrations import sglang as integration
from mla_suite.ops.plan import scheduler
from mla_suite.ops.plan.metadata import Plan, Word

HEADS, LATENT, WIDTH = theirs.HEADS, theirs.LATENT, theirs.WIDTH
LENGTHS, POOL_ROWS = [300, 9, 64], [4, 0, 2]


@pytest.fixture
def decodes(monkeypatch):
    """max_seqlen_q of every call of our decode, which has splits as its plan has them."""
    seen, decode = [], mla_suite.decode

    def counted(*args, **options):
        seen.append(options["max_seqlen_q"])
        plan = options["plan"]
        assert plan is None or Plan.read(plan).header[Word.SPLIT_SIZE] == options["split_size"]
        return decode(*args, **options)

    monkeypatch.setattr(mla_suite, "decode", counted)
    return seen


@pytest.fixture
def extends(monkeypatch):
    """Batches that went to SGLang's own extend."""
    seen = []
    monkeypatch.setattr(
        integration.TritonAttnBackend, "forward_extend", lambda self, q, *args, **options: seen.append(q.shape[0])
    )
    return seen


@pytest.fixture
def ngram_worker(monkeypatch):
    """A stand-in for SGLang's worker of n-grams, which needs its compiled library."""
    name = "sglang.srt.speculative.ngram_worker"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].USE_FULL_MASK = True
    return sys.modules[name]


def filled(runner, lengths, page, k_scale):
    """Give each request pages in random order and fill the pool with rows as SGLang stores them."""
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    free, first = torch.randperm(pool.size // page) + 1, 0
    for row, length in zip(POOL_ROWS, lengths, strict=True):
        count = -(-length // page)
        slots = (free[first : first + count, None] * page + torch.arange(page)).flatten()[: table.shape[1]]
        table[row, : len(slots)] = slots.int()
        first += count
    for buffer in pool.kv_buffer:
        rows = (torch.randn(buffer.shape) / k_scale).to(pool.dtype)
        buffer.copy_(rows.view(pool.store_dtype))


def made(monkeypatch, page=64, dtype=torch.bfloat16, *, lengths=LENGTHS, k_scale=None, runner=(), **settings):
    """(backend, runner) of a server with these settings; the requests have pages of `lengths`, and the pool has rows.

    The pool writes the two parts of a row with a Triton kernel, which needs a GPU: `scatter` stands for it.
    """
    theirs.settings(monkeypatch, **settings)
    monkeypatch.setattr(theirs.memory_pool.MLATokenToKVPool, "_scatter_mla_rows", scatter)
    runner = theirs.runner(page, dtype, **dict(runner))
    filled(runner, lengths, page, k_scale or 1.0)
    return integration.MLASuiteAttnBackend(runner), runner


def scatter(pool, buffer, slots, latents, rope):
    buffer[slots] = torch.cat((latents, rope), dim=-1)


def stored(runner, layer_id, row, length, k_scale):
    slots = runner.req_to_token_pool.req_to_token[row, :length].long()
    pool = runner.token_to_kv_pool
    return pool.kv_buffer[layer_id][slots, 0].view(pool.dtype).double() * k_scale


def exact(q, keys, scale, tree=None):
    """Attention of q [q_len, heads, width] over keys [kv_len, width] in fp64, causal or as a tree says."""
    q_len, kv_len = q.shape[0], keys.shape[0]
    scores = torch.einsum("qhd,kd->qhk", q.double(), keys) * scale
    hidden = torch.arange(kv_len) > torch.arange(q_len)[:, None] + kv_len - q_len
    if tree is not None:
        hidden[:, kv_len - q_len :] = ~tree
    return torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1) @ keys[:, :LATENT]


def step(backend, runner, mode, lengths, q_lens, k_scale, *, in_two=False, drafts=None, fp8_queries=False, held=None):
    """One pass over both layers; `lengths` include the new tokens. Compares every query token with fp64.

    Returns its batch, whose object the next step may use again: `held`.
    """
    ends = [
        runner.req_to_token_pool.req_to_token[row, n - q : n]
        for row, n, q in zip(POOL_ROWS, lengths, q_lens, strict=True)
    ]
    slots = torch.cat(ends).long()
    verify = mode.is_target_verify()
    counted = [n - q if verify else n for n, q in zip(lengths, q_lens, strict=True)]
    batch = theirs.batch(mode, counted, POOL_ROWS, slots, q_lens if mode == ForwardMode.EXTEND else None)
    if held is not None:
        vars(held).update(vars(batch))
        batch = held
    trees = [None] * len(lengths)
    if drafts is not None:
        batch.spec_info = drafts
        backend.forward_metadata = SimpleNamespace(custom_mask=drafts.custom_mask)
        trees = drafts.custom_mask[: sum(q**2 for q in q_lens)].view(-1, q_lens[0], q_lens[0]).bool()
    call = backend.forward_decode if mode.is_decode() else backend.forward_extend
    tokens = sum(q_lens)
    for layer_id in range(2):
        layer = theirs.layer(layer_id, k_scale)
        q, k = torch.randn(tokens, HEADS, WIDTH).bfloat16(), torch.randn(tokens, 1, WIDTH).bfloat16()
        before = k.clone()
        if in_two:
            parts = dict(q_rope=q[..., LATENT:], k_rope=k[..., LATENT:])
            out = call(q[..., :LATENT].flatten(1), k[..., :LATENT], k[..., :LATENT], layer, batch, **parts)
        else:
            out = call(q.flatten(1), k, k[..., :LATENT], layer, batch)
        assert torch.equal(k, before)  # prefill may still read the rows that it gave
        first = 0
        for row, length, q_len, tree in zip(POOL_ROWS, lengths, q_lens, trees, strict=True):
            keys = stored(runner, layer_id, row, length, k_scale or 1.0)
            new = before[first : first + q_len, 0].double()
            fp8 = runner.token_to_kv_pool.dtype == torch.float8_e4m3fn
            bound = 2**-3 * new.abs() if fp8 else 2**-8 * new.abs()  # half a unit in the last place, doubled
            assert bool(((keys[-q_len:] - new).abs() <= bound + fp8 * (k_scale or 1.0) * 2**-9).all())
            queries = q[first : first + q_len]
            if fp8_queries:
                scale = k_scale or 1.0
                queries = (queries / scale).to(torch.float8_e4m3fn).double() * scale
            want = exact(queries, keys, layer.scaling, tree)
            found = out[first : first + q_len].view(q_len, HEADS, LATENT)
            torch.testing.assert_close(found.double(), want, rtol=2**-8, atol=2e-5)
            first += q_len
    return batch


def extend(backend, mode=ForwardMode.EXTEND, new=(4, 4, 4), *, layer=None, drafts=None, **options):
    """Give 12 tokens to the first layer as prompts or drafts."""
    batch = theirs.batch(mode, LENGTHS, POOL_ROWS, torch.arange(12), list(new))
    batch.spec_info = drafts
    q, k = torch.randn(12, HEADS * WIDTH), torch.randn(12, 1, WIDTH)
    backend.forward_extend(q, k, k[..., :LATENT], layer or theirs.layer(0), batch, **options)


@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.parametrize(("page", "dtype", "k_scale"), [
    (64, torch.bfloat16, None),
    (1, torch.bfloat16, None),
    (64, torch.float8_e4m3fn, 0.25),
    (16, torch.float8_e4m3fn, 0.25),
])  # fmt: skip
def test_decode(monkeypatch, decodes, page, dtype, k_scale, in_two):
    """The second step has the first one's batch, as a captured one has."""
    served, held = made(monkeypatch, page, dtype, lengths=[n + 2 for n in LENGTHS], k_scale=k_scale), None
    for more in (0, 1):
        lengths = [n + more for n in LENGTHS]
        held = step(*served, ForwardMode.DECODE, lengths, [1, 1, 1], k_scale, in_two=in_two, held=held)
    assert decodes == [1] * 4


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_no_metadata_is_made_for_decode(monkeypatch, mode):
    """A list of the slots of all keys and their division into splits, which SGLang's decode reads and ours does not."""
    backend, _ = made(monkeypatch)
    asked, names = [], ("init_forward_metadata", "init_forward_metadata_out_graph")
    for name in names:
        monkeypatch.setattr(integration.TritonAttnBackend, name, lambda self, batch, name=name: asked.append(name))
        getattr(backend, name)(theirs.batch(mode, LENGTHS, POOL_ROWS, torch.arange(3)))
    assert asked == list(names if mode == ForwardMode.EXTEND else ())


@pytest.mark.parametrize(("mode", "q_lens"), [(ForwardMode.DECODE, [1, 1, 1]), (ForwardMode.TARGET_VERIFY, [4, 4, 4])])
@pytest.mark.parametrize("k_scale", [None, 0.25])
@pytest.mark.parametrize("fewest", [None, 4 * HEADS, 4 * HEADS + 1])
def test_queries_of_an_fp8_cache_are_fp8_where_decode_gains(monkeypatch, decodes, fewest, k_scale, mode, q_lens):
    """SGLang's kernel that quantises is its compiled library's; torch code of SGLang's for other GPUs stands for it."""

    def quantised(rows, scale):
        queries.append(rows.shape)
        return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    queries = []
    monkeypatch.setattr(integration, "scaled_fp8_quant", quantised)
    monkeypatch.setattr(integration, "fp8_query_rows", lambda like, page_size, joined: fewest)
    asked, served = fewest == 4 * HEADS, made(monkeypatch, dtype=torch.float8_e4m3fn, k_scale=k_scale)
    step(*served, mode, LENGTHS, q_lens, k_scale, in_two=True, fp8_queries=asked)
    assert queries == [(sum(q_lens) * HEADS, WIDTH)] * 2 * asked
    assert len(decodes) == 2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "k_scale"), [(torch.bfloat16, None), (torch.float8_e4m3fn, 0.25)])
def test_verification_of_four_drafts(monkeypatch, decodes, extends, dtype, k_scale, deterministic):
    backend, runner = made(monkeypatch, dtype=dtype, k_scale=k_scale, deterministic=deterministic)
    step(backend, runner, ForwardMode.TARGET_VERIFY, LENGTHS, [4, 4, 4], k_scale)
    assert decodes == [4, 4]
    assert extends == []
    assert backend.needs_cpu_seq_lens == deterministic
    assert (Plan.read(backend._plan).header[Word.SPLIT_SIZE] > 0) == deterministic


def random_tree(drafts):
    """bool [drafts, drafts] of a tree in which each draft follows any before it."""
    seen = torch.eye(drafts, dtype=torch.bool)
    for draft in range(1, drafts):
        seen[draft] |= seen[int(torch.randint(draft, ()))]
    return seen


@pytest.mark.parametrize(("algorithm", "draft_tokens"), [("EAGLE", 8), ("STANDALONE", 4), ("NGRAM", 12), ("NGRAM", 64)])
def test_trees_of_drafts(monkeypatch, decodes, extends, ngram_worker, algorithm, draft_tokens):
    lengths = [n + draft_tokens for n in LENGTHS]
    runner = dict(algorithm=algorithm)
    served = made(monkeypatch, lengths=lengths, runner=runner, topk=4, draft_tokens=draft_tokens)
    mask = torch.stack([random_tree(draft_tokens) for _ in LENGTHS]).flatten()
    mask = torch.cat((mask, torch.ones(7, dtype=torch.bool)))  # as in a buffer for a larger batch
    drafts = theirs.drafts(topk=4)
    drafts.custom_mask = mask
    if algorithm == "NGRAM":
        drafts = NgramVerifyInput(custom_mask=mask, draft_token_num=draft_tokens)
    step(*served, ForwardMode.TARGET_VERIFY, lengths, [draft_tokens] * 3, None, drafts=drafts)
    assert decodes == [draft_tokens] * 2
    assert extends == []


def test_masks_are_of_drafts_alone(monkeypatch, ngram_worker):
    """EAGLE's worker asks the backend, in eager steps and in captured ones; that of n-grams reads its own module."""
    backend, _ = made(monkeypatch, topk=4, draft_tokens=8)
    assert backend.verify_mask.mode is TreeMaskMode.QLEN_ONLY
    assert not backend.verify_mask.fits(1)
    backend.init_cuda_graph_state(2, 16)
    assert backend.verify_mask.mode is TreeMaskMode.QLEN_ONLY
    assert backend.verify_mask.fits(2)
    assert backend.verify_mask.buffer.numel() == 2 * 8 * 9
    assert ngram_worker.USE_FULL_MASK
    made(monkeypatch, runner=dict(algorithm="NGRAM"), topk=4, draft_tokens=8)
    assert not ngram_worker.USE_FULL_MASK
    for settings in (dict(draft_tokens=4), dict(topk=4, draft_tokens=65)):
        assert made(monkeypatch, **settings)[0].verify_mask is None


def test_a_tree_that_nobody_can_read_is_refused(monkeypatch, extends):
    backend, _ = made(monkeypatch, topk=4)
    with pytest.raises(ValueError, match="verification of a tree of drafts with sinks; scores are plain softmax"):
        extend(backend, ForwardMode.TARGET_VERIFY, drafts=theirs.drafts(), sinks=torch.zeros(HEADS))
    assert extends == []


@pytest.mark.parametrize(("tile_rows", "bound"), [(64, 8), (HEADS, 1)], ids=["packed", "by token"])
def test_short_extends(monkeypatch, decodes, extends, tile_rows, bound):
    monkeypatch.setattr(scheduler, "TILE_ROWS", tile_rows)
    step(*made(monkeypatch), ForwardMode.EXTEND, LENGTHS, [8, 1, 3], None)
    assert decodes == [bound] * 2
    assert extends == []


def test_deterministic_prefill_stays_with_sglang(monkeypatch, decodes, extends):
    """A short extend may be what remains of a long one after a prefix was cached, and must have the same bits."""
    backend, _ = made(monkeypatch, deterministic=True)
    extend(backend, new=(8, 1, 3))
    assert (decodes, extends) == ([], [12])


def test_what_stays_with_sglang(monkeypatch, decodes, extends):
    """Trees of drafts that no option announced, rows of different lengths, long extends, tokens that pad a
    captured prefill, un-absorbed layers, sinks."""
    backend, _ = made(monkeypatch)
    ragged = theirs.drafts()
    ragged.ragged_verify_layout = object()
    ngram = NgramVerifyInput(custom_mask=torch.ones(1), draft_token_num=4)  # whose breadth of 1 is no chain
    for drafts in (theirs.drafts(topk=4), ngram, ragged):
        extend(backend, ForwardMode.TARGET_VERIFY, drafts=drafts)
    extend(backend, new=(10, 1, 1))
    extend(backend, new=(4, 4, 1))
    extend(backend, sinks=torch.zeros(HEADS))
    own_keys = theirs.layer(0)
    own_keys.tp_k_head_num, own_keys.v_head_dim = HEADS, 128
    extend(backend, layer=own_keys)
    extend(backend, ForwardMode.DRAFT_EXTEND_V2)
    assert extends == [12] * 8
    assert decodes == []


def test_what_stays_with_sglang_has_whole_rows(monkeypatch):
    """SGLang's Triton backend takes no parts."""
    seen = []
    backend, _ = made(monkeypatch)
    monkeypatch.setattr(integration.TritonAttnBackend, "forward_extend", lambda self, *args: seen.append(args))
    batch = theirs.batch(ForwardMode.EXTEND, LENGTHS, POOL_ROWS, torch.arange(12), [10, 1, 1])
    q, k, layer = torch.randn(12, HEADS, WIDTH), torch.randn(12, 1, WIDTH), theirs.layer(0)
    parts = dict(q_rope=q[..., LATENT:], k_rope=k[..., LATENT:])
    backend.forward_extend(q[..., :LATENT].flatten(1), k[..., :LATENT], k[..., :LATENT], layer, batch, False, **parts)
    ((whole_q, whole_k, v, *others),) = seen
    assert torch.equal(whole_q, q.flatten(1))
    assert torch.equal(whole_k, k)
    assert torch.equal(v, k[..., :LATENT])
    assert others == [layer, batch, False]


def test_the_parts_of_a_query_are_joined_by_sglangs_kernel(monkeypatch, decodes):
    """Queries of 512 + 64 in bf16; its kernel needs a GPU, and torch stands for it."""
    joined = []

    def join(latent, rope):
        joined.append((latent.shape, rope.shape))
        return torch.cat((latent, rope), dim=-1)

    monkeypatch.setattr(integration, "concat_mla_absorb_q_general", join)
    step(*made(monkeypatch), ForwardMode.DECODE, LENGTHS, [1, 1, 1], None, in_two=True)
    assert joined == [((3, HEADS, LATENT), (3, HEADS, WIDTH - LATENT))] * 2
    assert decodes == [1] * 2


@pytest.mark.parametrize(("dtype", "joins"), [(torch.bfloat16, 0), (torch.float8_e4m3fn, 2)], ids=str)
def test_parts_are_joined_only_where_no_kernel_takes_them(monkeypatch, dtype, joins):
    """On an H100 or H200 decode reads both parts of 16-bit queries, over rows of 16 bits."""
    joined = []
    real = integration.joined_queries
    monkeypatch.setattr(integration, "joined_queries", lambda *parts: joined.append(parts) or real(*parts))
    monkeypatch.setattr(integration, "takes_query_parts", lambda like, heads, q_len: True)
    step(*made(monkeypatch, dtype=dtype), ForwardMode.DECODE, LENGTHS, [1, 1, 1], None, in_two=True)
    assert len(joined) == joins


@pytest.mark.parametrize("name", ["sinks", "score_mod", "aux_tensors"])
def test_scores_that_are_not_plain_are_refused(monkeypatch, decodes, name):
    backend, _ = made(monkeypatch)
    with pytest.raises(ValueError, match=f"MLASuiteAttnBackend: {name} is given; scores are plain softmax"):
        backend.forward_decode(None, None, None, theirs.layer(0), None, **{name: torch.zeros(HEADS)})
    for change, reason in (
        (dict(logit_cap=30.0), "logit_cap is 30.0; scores are not capped"),
        (dict(sliding_window_size=128), "sliding_window_size is 128; all keys are attended to"),
        (dict(xai_temperature_len=8), "xai_temperature_len is 8"),
    ):
        layer = SimpleNamespace(**{**vars(theirs.layer(0)), **change})
        with pytest.raises(ValueError, match=reason):
            backend.forward_decode(None, None, None, layer, None)
    assert decodes == []


def test_servers_that_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="decode context parallelism over 2 ranks is not supported"):
        made(monkeypatch, dcp_size=2)
    translator = SimpleNamespace(reads_are_translated=True)
    with pytest.raises(ValueError, match="virtual page ids"):
        made(monkeypatch, runner=dict(translator=translator))
    with pytest.raises(ValueError, match="no latent attention"):
        integration.MLASuiteAttnBackend(SimpleNamespace(use_mla_backend=False))


def test_an_sglang_that_names_an_argument_otherwise_is_refused(monkeypatch):
    def renamed(self, q, k, v, layer, batch, save_kv_cache=True):
        raise AssertionError

    monkeypatch.setattr(integration.TritonAttnBackend, "forward_extend", renamed)
    text = r"forward_extend of SGLang 0.5.* takes no forward_batch; install SGLang 0.5.20 to"
    with pytest.raises(TypeError, match=text):
        made(monkeypatch)


def test_a_newer_sglang_with_this_interface_works_with_one_warning(monkeypatch):
    monkeypatch.setattr(interface, "_warned", set())
    monkeypatch.setattr(integration, "__version__", "0.6.0")
    with pytest.warns(UserWarning, match=r"SGLang 0.6.0 is newer than 0.5.23, the newest that mla_suite was tested"):
        made(monkeypatch)


def test_what_the_scheduler_is_told(monkeypatch):
    """When the token table may change, and whether lengths are read on the host."""
    backend, _ = made(monkeypatch)
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        assert backend.shared_read_ends(mode) is SharedReadEnds.POST_REPLAY
    assert backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN
    assert backend.needs_cpu_seq_lens is False
    assert made(monkeypatch, page=1)[0].needs_cpu_seq_lens is True
