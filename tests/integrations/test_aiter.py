"""Scripts as AITER's documentation and its callers have them, run on our face of it, against the formula."""

import inspect
import itertools

import pytest
import torch

from mla_suite.integrations import aiter, plans


def attend(q, keys, scale, d_v=512):
    """One query token [heads, d] over keys [n, d]."""
    if len(keys) == 0:
        return torch.zeros(q.shape[0], d_v), torch.full((q.shape[0],), -torch.inf)
    scores = q.float() @ keys.float().T * scale
    return torch.softmax(scores, -1) @ keys[:, :d_v].float(), scores.logsumexp(-1)


class Step:
    """The tensors of one decode step, named as AITER names them; rows past a sequence's end are NaN."""

    def __init__(self, kv_lens, q_lens, page_size=1, heads=16, width=576, q_dtype=torch.bfloat16, dtype=None):
        dtype = dtype or q_dtype
        counts = [-(-n // page_size) for n in kv_lens]
        self.kv_lens, self.q_lens, self.page_size = kv_lens, q_lens, page_size
        self.num_page = sum(counts) + 3
        self.kv_indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        self.qo_indptr = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        self.kv_indices = torch.randperm(self.num_page)[: sum(counts)].int()
        last = [n - (count - 1) * page_size if n else 1 for n, count in zip(kv_lens, counts, strict=True)]
        self.kv_last_page_lens = torch.tensor(last, dtype=torch.int32)
        self.kv_buffer = torch.full((self.num_page, page_size, 1, width), torch.nan).to(dtype)
        for b, n in enumerate(kv_lens):
            rows = torch.arange(n)
            pages = self.kv_indices[int(self.kv_indptr[b]) + rows // page_size].long()
            self.kv_buffer[pages, rows % page_size, 0] = torch.randn(n, width).to(dtype)
        self.total = sum(q_lens)
        self.max_seqlen_q = max(q_lens)
        self.q = torch.randn(self.total, heads, width).to(q_dtype)
        out_dtype = torch.bfloat16 if self.q.dtype.itemsize == 1 else q_dtype
        self.o = torch.full((self.total, heads, 512), torch.nan, dtype=out_dtype)

    @property
    def args(self):
        return (
            self.q,
            self.kv_buffer,
            self.o,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.kv_last_page_lens,
            self.max_seqlen_q,
        )

    def keys(self, b):
        pages = self.kv_indices[self.kv_indptr[b] : self.kv_indptr[b + 1]].long()
        return self.kv_buffer[pages].flatten(0, 2)[: self.kv_lens[b]]

    def expected(self, scale=None, causal=True):
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        found = []
        for b, (kv_len, q_len) in enumerate(zip(self.kv_lens, self.q_lens, strict=True)):
            for i in range(q_len):
                visible = max(kv_len - (q_len - 1 - i), 0) if causal else kv_len
                found.append(attend(self.q[self.qo_indptr[b] + i], self.keys(b)[:visible], scale))
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True))

    def check(self, lse, expected):
        torch.testing.assert_close(self.o.float(), expected[0], rtol=2**-8, atol=2e-5)
        torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)

    def metadata(self, heads=16):
        """Buffers as `get_mla_metadata_info_v1` sizes them, filled by `get_mla_metadata_v1`."""
        sizes = aiter.get_mla_metadata_info_v1(
            len(self.kv_lens), self.max_seqlen_q, heads, self.q.dtype, self.kv_buffer.dtype, is_sparse=False
        )
        buffers = [torch.empty(size, dtype=dtype) for size, dtype in sizes]
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(0x7F)
        work_metadata, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map = buffers
        aiter.get_mla_metadata_v1(
            self.qo_indptr,
            self.kv_indptr,
            self.kv_last_page_lens,
            heads,
            1,
            True,
            work_metadata,
            work_info_set,
            work_indptr,
            reduce_indptr,
            reduce_final_map,
            reduce_partial_map,
            page_size=self.page_size,
            kv_granularity=max(self.page_size, 16),
            max_seqlen_qo=self.max_seqlen_q,
            uni_seqlen_qo=self.max_seqlen_q if len(set(self.q_lens)) == 1 else -1,
            fast_mode=True,
            dtype_q=self.q.dtype,
            dtype_kv=self.kv_buffer.dtype,
        )
        return dict(
            work_meta_data=work_metadata,
            work_indptr=work_indptr,
            work_info_set=work_info_set,
            reduce_indptr=reduce_indptr,
            reduce_final_map=reduce_final_map,
            reduce_partial_map=reduce_partial_map,
        )


STEPS = {
    "decode": dict(kv_lens=[300, 21, 1, 64], q_lens=[1] * 4),
    "zero-length": dict(kv_lens=[300, 0, 0, 65], q_lens=[1] * 4),
    "mtp": dict(kv_lens=[700, 2, 130], q_lens=[4] * 3),
    "mtp of 3": dict(kv_lens=[700, 2, 130], q_lens=[3] * 3, heads=12),
    "varlen": dict(kv_lens=[300, 40, 0, 65], q_lens=[1, 5, 2, 0], heads=8),
    "page 16": dict(kv_lens=[300, 16, 0, 65], q_lens=[2] * 4, page_size=16),
    "page 64": dict(kv_lens=[700, 64, 1, 65], q_lens=[1] * 4, page_size=64, heads=128),
    "page 61": dict(kv_lens=[700, 61, 1, 62], q_lens=[1] * 4, page_size=61),
}


@pytest.mark.parametrize("mode", ["plain", "splits", "persistent", "persistent, copied"])
@pytest.mark.parametrize("name", STEPS)
def test_decode(name, mode):
    step = Step(**STEPS[name])
    options = dict(page_size=step.page_size, return_lse=True)
    if mode == "splits":
        options["num_kv_splits"] = 3
    if mode.startswith("persistent"):
        options |= step.metadata(step.q.shape[1])
    if mode == "persistent, copied":
        options |= {key: options[key].clone() for key in ("work_indptr", "work_info_set")}
    _, lse = aiter.mla_decode_fwd(*step.args, **options)
    step.check(lse, step.expected())


@pytest.mark.parametrize(
    ("q_dtype", "dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_dtypes_and_scales(q_dtype, dtype):
    step = Step([200, 3], [2, 2], q_dtype=q_dtype, dtype=dtype)
    q_scale, kv_scale = torch.tensor([0.5]), torch.tensor([1.75])
    _, lse = aiter.mla_decode_fwd(*step.args, sm_scale=0.03, q_scale=q_scale, kv_scale=kv_scale, return_lse=True)
    o = step.o
    step.q = step.q.float() * (0.5 if q_dtype.itemsize == 1 else 1)
    step.kv_buffer = step.kv_buffer.float() * (1.75 if dtype.itemsize == 1 else 1)
    step.o = o
    step.check(lse, step.expected(0.03))


def test_without_a_mask_and_without_lse():
    step = Step([200, 3], [3, 3])
    returned = aiter.mla_decode_fwd(*step.args, causal=False)
    assert returned[0] is step.o
    assert returned[1] is None
    torch.testing.assert_close(step.o.float(), step.expected(causal=False)[0], rtol=2**-8, atol=2e-5)


def test_the_output_is_written_where_it_lies():
    """`o` may be a strided part of a larger tensor, and nothing beside it is touched."""
    step = Step([200, 3], [1, 1])
    wide = torch.full((2, 20, 600), 7.0, dtype=torch.bfloat16)
    step.o = wide[:, 2:18, 40:552]
    _, lse = aiter.mla_decode_fwd(*step.args, return_lse=True)
    step.check(lse, step.expected())
    assert bool((wide[:, :2] == 7).all() & (wide[:, 18:] == 7).all() & (wide[..., :40] == 7).all())


def test_selected_keys_as_pages_of_one_token():
    """Sparse attention as AITER's callers spell it: a kv_indptr per query token over pages of one token."""
    step = Step([500], [3])
    picks = [torch.randperm(500)[:n] for n in (60, 0, 17)]
    slots = torch.cat([step.kv_indices[p] for p in picks])
    indptr = torch.tensor([0, 60, 60, 77], dtype=torch.int32)
    one = torch.ones(3, dtype=torch.int32)
    tokens = torch.arange(4, dtype=torch.int32)
    _, lse = aiter.mla_decode_fwd(step.q, step.kv_buffer, step.o, tokens, indptr, slots, one, 1, return_lse=True)
    rows = step.keys(0)
    parts = [attend(step.q[t], rows[p], 576**-0.5) for t, p in enumerate(picks)]
    step.check(lse, tuple(torch.stack(part) for part in zip(*parts, strict=True)))


def sparse_metadata(step, q_len, topk):
    """As op_tests of AITER fill it: one kv_indptr per sequence, planned with topk, a tile per query token."""
    sizes = aiter.get_mla_metadata_info_v1(
        len(step.kv_lens), q_len, 16, torch.bfloat16, torch.bfloat16, is_sparse=True, num_kv_splits=32
    )
    work_metadata, work_indptr, work_info_set, *reduce = (torch.zeros(size, dtype=dtype) for size, dtype in sizes)
    lengths = (step.qo_indptr, step.kv_indptr, step.kv_last_page_lens)
    aiter.get_mla_metadata_v1(
        *lengths, 16, 1, True, work_metadata, work_info_set, work_indptr, *reduce,
        page_size=1, max_seqlen_qo=1, uni_seqlen_qo=1, max_split_per_batch=32, topk=topk,
    )  # fmt: skip
    names = ("reduce_indptr", "reduce_final_map", "reduce_partial_map")
    given = dict(work_meta_data=work_metadata, work_indptr=work_indptr, work_info_set=work_info_set)
    return given | dict(zip(names, reduce, strict=True))


@pytest.mark.parametrize("q_len", [1, 3])
def test_selected_keys_by_metadata_with_topk(q_len):
    """kv_indices [tokens, topk]: rows shorter than topk end in anything."""
    topk, lens = 64, [200, 0, 40, 65]
    step = Step(lens, [q_len] * 4)
    made = sparse_metadata(step, q_len, topk)
    chosen, expected = torch.full((step.total, topk), 2**31 - 1, dtype=torch.int32), []
    for token in range(step.total):
        rows = torch.randperm(lens[token // q_len])[:topk]
        slots = step.kv_indices[step.kv_indptr[token // q_len] + rows]
        chosen[token, : len(rows)] = slots
        expected.append(attend(step.q[token], step.kv_buffer[slots.long()].flatten(0, 2), 0.05))
    arguments = (*step.args[:5], chosen.view(-1), step.kv_last_page_lens, 1, 1, 1, 0.05)
    _, lse = aiter.mla_decode_fwd(*arguments, num_kv_splits=32, return_lse=True, **made)
    step.check(lse, tuple(torch.stack(part) for part in zip(*expected, strict=True)))

    works = made["work_info_set"][: int(made["work_indptr"][-1])].tolist()
    for token in range(step.total):
        spans = [(work[4], work[5]) for work in works if work[0] == token]
        assert spans[0][0] == token * topk
        assert spans[-1][1] == token * topk + min(lens[token // q_len], topk)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))

    # the same buffers planned densely select no more
    order = ("work_meta_data", "work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map")
    buffers = [made[key] for key in order] + [made["reduce_partial_map"]]
    aiter.get_mla_metadata_v1(step.qo_indptr, step.kv_indptr, step.kv_last_page_lens, 16, 1, True, *buffers)
    _, lse = aiter.mla_decode_fwd(*step.args, return_lse=True, **made)
    step.check(lse, step.expected())


def test_refused_selections():
    step = Step([20, 3], [1, 1])
    made = sparse_metadata(step, 1, 8)
    for changes, message in (
        (dict(kv_indices=step.kv_indices[:15]), "2 query tokens and topk 8 need 16"),
        (dict(kv_buffer=step.kv_buffer.to(torch.float8_e4m3fn)), "bf16, fp16 or fp32 pages of one token"),
    ):
        names = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
        given = dict(zip(names, step.args, strict=True)) | made | changes
        with pytest.raises(ValueError, match=message):
            aiter.mla_decode_fwd(**given)
    assert bool(step.o.isnan().all()), "written although refused"


def test_arguments_are_aiters():
    """Names, order and defaults, as AITER's own documentation of August 2026 lists them."""
    lists = dict(
        mla_decode_fwd="q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size=1 "
        "nhead_kv=1 sm_scale=None logit_cap=0.0 num_kv_splits=None num_kv_splits_indptr=None work_meta_data=None "
        "work_indptr=None work_info_set=None reduce_indptr=None reduce_final_map=None reduce_partial_map=None "
        "q_scale=None kv_scale=None intra_batch_mode=False return_logits=False return_lse=False g_kv_indptr=None "
        "cp_world_size=1 cp_rank=0 causal=True",
        get_mla_metadata_info_v1="batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode=True "
        "num_kv_splits=32 intra_batch_mode=False max_split_per_batch=-1",
        get_mla_metadata_v1="seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k "
        "is_causal work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map "
        "page_size=1 kv_granularity=16 max_seqlen_qo=-1 uni_seqlen_qo=-1 fast_mode=True topk=-1 max_split_per_batch=-1 "
        "intra_batch_mode=False is_cp_round_robin=False mla_version=None dtype_q_nope=None dtype_q_rope=None "
        "dtype_kv_nope=None dtype_kv_rope=None dtype_q=None dtype_kv=None",
        mla_reduce_v1="partial_output partial_lse reduce_indptr reduce_final_map reduce_partial_map max_seqlen_q "
        "num_kv_splits final_output final_lse=None",
        mla_decode_reduce="partial_output partial_lse reduced kv_indptr T batch=0 vec=0 num_splits=0",
    )
    for name, expected in lists.items():
        parameters = inspect.signature(getattr(aiter, name)).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert shown == expected.split(), name
    assert aiter.mla.mla_decode_fwd is aiter.mla_decode_fwd


def test_what_is_absent_says_so():
    from mla_suite.integrations.aiter import mla_decode_fwd_v4_nm

    with pytest.raises(NotImplementedError, match=r"mla_decode_fwd_v4_nm: .*call mla_suite.sparse_decode"):
        mla_decode_fwd_v4_nm(1, sink=2)
    with pytest.raises(AttributeError, match="has no attribute 'mla_decode_forward'"):
        aiter.mla_decode_forward  # noqa: B018  the look-up is what is tested


def test_plan_written_in_aiters_format_is_the_one_that_runs():
    step = Step([700, 2, 130], [4] * 3, page_size=16)
    made = step.metadata()
    pointers = made["work_meta_data"].view(torch.int64).tolist()
    assert pointers == [made["work_indptr"].data_ptr(), made["work_info_set"].data_ptr()]
    kept = plans.recall(made["work_info_set"], 3)
    read = plans.from_aiter(made["work_indptr"], made["work_info_set"], step.kv_indptr, page_size=16)
    assert torch.equal(kept, read)
    works = made["work_info_set"][: int(made["work_indptr"][-1])].tolist()
    assert {tuple(work[2:4]) for work in works} == {(0, 4), (4, 8), (8, 12)}
    for batch in range(3):
        spans = [(work[4], work[5]) for work in works if work[0] == batch]
        assert spans[0][0] == step.kv_indptr[batch]
        assert spans[-1][1] == step.kv_indptr[batch + 1]
        assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))


def test_metadata_for_the_next_step_goes_into_the_same_plan():
    """So that a captured step that reads the plan replays with the new one."""
    step = Step([700, 2, 130], [1] * 3)
    made = step.metadata()
    before = plans.recall(made["work_info_set"], 3)
    words = before.clone()
    grown = Step([1, 1800, 9], [1] * 3)
    buffers = [made[key] for key in ("work_meta_data", "work_info_set", "work_indptr")]
    reduce = [made[key] for key in ("reduce_indptr", "reduce_final_map", "reduce_partial_map")]
    lengths = (grown.qo_indptr, grown.kv_indptr, grown.kv_last_page_lens)
    aiter.get_mla_metadata_v1(*lengths, 16, 1, True, *buffers, *reduce)
    assert plans.recall(made["work_info_set"], 3) is before
    assert not torch.equal(before, words)
    _, lse = aiter.mla_decode_fwd(*grown.args, return_lse=True, **made)
    grown.check(lse, grown.expected())


def test_two_stages_by_hand():
    """The works of a plan done one by one, then `mla_reduce_v1`, as a caller of AITER's low level does."""
    step = Step([700, 0, 130, 64], [2] * 4, page_size=4)
    made = step.metadata()
    heads, entries = 16, made["reduce_partial_map"].shape[0]
    partial_output = torch.full((entries * 2, 1, heads, 512), torch.nan)
    partial_lse = torch.full((entries * 2, 1, heads, 1), torch.nan)
    final_lse = torch.full((step.total, heads), torch.nan)
    splits = 0
    for work in made["work_info_set"][: int(made["work_indptr"][-1])].tolist():
        b, row, q_start, q_end, kv_start, kv_end = work[:6]
        for token in range(q_start, q_end):
            visible = step.kv_lens[b] - (q_end - 1 - token)
            first = (kv_start - int(step.kv_indptr[b])) * 4
            keys = step.keys(b)[first : max(min((kv_end - int(step.kv_indptr[b])) * 4, visible), first)]
            out, lse = attend(step.q[token], keys, 576**-0.5)
            if row < 0:
                step.o[token], final_lse[token] = out.bfloat16(), lse
            else:
                splits += 1
                partial_output[row + token - q_start, 0], partial_lse[row + token - q_start, 0, :, 0] = out, lse
    assert splits
    aiter.mla_reduce_v1(
        partial_output,
        partial_lse,
        made["reduce_indptr"],
        made["reduce_final_map"],
        made["reduce_partial_map"],
        2,
        0,
        step.o,
        final_lse,
    )
    step.check(final_lse, step.expected())


def merge(outs, lses):
    weight = torch.softmax(lses, 0).nan_to_num(0.0)
    return (weight[..., None] * outs.nan_to_num(0.0)).sum(0), torch.logsumexp(lses, 0)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("final_map", [True, False])
def test_reduce_of_a_general_map(out_dtype, final_map):
    """Tiles out of order, partials scattered, tiles of 0 and 1 split left alone, absurd entries past the end."""
    outs, lses = torch.randn(40, 8, 128), torch.randn(40, 8) * 3
    lses[6:8] = -torch.inf
    reduce_indptr = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    reduce_partial_map = torch.tensor([6, 0, 20, 30, 2, 4, 38, 10, 12, 2**31 - 1, -7], dtype=torch.int32)
    starts = [4, 0, 6, 2] if final_map else [0, 2, 4, 6]
    tiles = torch.tensor([[s, s + 2] for s in starts], dtype=torch.int32) if final_map else None
    final, final_lse = torch.full((9, 8, 128), 5.0, dtype=out_dtype), torch.full((9, 8), 5.0)
    aiter.mla_reduce_v1(outs, lses, reduce_indptr, tiles, reduce_partial_map, 2, 0, final, final_lse)
    untouched = torch.ones(9, dtype=torch.bool)
    for tile in (0, 3):
        rows = reduce_partial_map[reduce_indptr[tile] : reduce_indptr[tile + 1]].long()
        for i in range(2):
            token = starts[tile] + i
            expected, lse = merge(outs[rows + i], lses[rows + i])
            torch.testing.assert_close(final[token].float(), expected, rtol=2**-8, atol=1e-5)
            torch.testing.assert_close(final_lse[token], lse)
            untouched[token] = False
    assert untouched.sum() == 5
    assert bool((final[untouched] == 5).all() & (final_lse[untouched] == 5).all())


@pytest.mark.parametrize("batch", [0, 2, 4, 8])
@pytest.mark.parametrize("num_splits", [1, 5, 16])
def test_decode_reduce(num_splits, batch):
    """The standalone reduce of equal splits; a split without keys has lse -inf and may hold anything."""
    T, heads = 6, 16
    outs, lses = torch.randn(T, num_splits, heads, 512), torch.randn(T, num_splits, heads, 1) * 3
    if num_splits > 1:
        outs[:, -1], lses[:, -1] = torch.nan, -torch.inf
        lses[2] = -torch.inf
    reduced = torch.full((T, heads, 512), torch.nan, dtype=torch.bfloat16)
    kv_indptr = torch.arange(T + 1, dtype=torch.int32) * 100
    aiter.mla_decode_reduce(outs, lses, reduced, kv_indptr, T, batch, 4, num_splits)
    for t in range(T):
        expected, _ = merge(outs[t], lses[t, ..., 0])
        torch.testing.assert_close(reduced[t].float(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(logit_cap=30.0), "scores are not capped"),
        (dict(nhead_kv=2), "1 KV head"),
        (dict(cp_world_size=2, cp_rank=1), "context parallel is not supported"),
        (dict(return_logits=True), "leave no partial results"),
        (dict(page_size=16), "page_size is 16"),
        (dict(work_meta_data=torch.zeros(2, dtype=torch.int64)), "all that get_mla_metadata_v1 filled"),
        (dict(kv_buffer=torch.zeros(9, 64, 1, 656, dtype=torch.uint8), page_size=64), "three-buffer and packed"),
        (dict(o=torch.zeros(2, 16, 512, dtype=torch.float16)), "decode.out: out is torch.float16"),
    ],
)
def test_refusals(changes, message):
    step = Step([20, 3], [1, 1])
    names = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
    with pytest.raises((ValueError, TypeError), match=message):
        aiter.mla_decode_fwd(**{**dict(zip(names, step.args, strict=True)), **changes})
    assert bool(step.o.isnan().all()), "written although refused"


def test_refused_plans_and_reductions():
    step = Step([20, 3], [1, 1])
    made = step.metadata()
    lengths = (step.qo_indptr, step.kv_indptr, step.kv_last_page_lens)
    order = ("work_meta_data", "work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map")
    buffers = [made[key] for key in order] + [made["reduce_partial_map"]]
    for changes, message in (
        (dict(topk=2048, page_size=16), "topk is 2048 and page_size 16"),
        (dict(is_cp_round_robin=True), "round-robin"),
    ):
        with pytest.raises(ValueError, match=message):
            aiter.get_mla_metadata_v1(*lengths, 16, 1, True, *buffers, **changes)
    with pytest.raises(ValueError, match=r"kv_last_page_lens is 16; it is the third argument, a tensor \[batch\]"):
        aiter.get_mla_metadata_v1(*lengths[:2], 16, 1, True, *buffers, 1)
    with pytest.raises(ValueError, match="2 sequences and 8 workers need 10"):
        aiter.get_mla_metadata_v1(*lengths, 16, 1, True, buffers[0], buffers[1][:9], *buffers[2:])
    outs, reduced = torch.zeros(2, 3, 4, 512), torch.zeros(2, 4, 512, dtype=torch.bfloat16)
    indptr = torch.zeros(3, dtype=torch.int32)
    for arguments, message in (
        ((2, 3, 0, 3), "batch is 3"),
        ((2, 2, 8, 3), "vec is 8"),
        ((3, 0, 0, 3), "with T = 3"),
        ((2, 0, 0, 4), r"\(2, 4, 4, 512\)"),
    ):
        with pytest.raises(ValueError, match=message):
            aiter.mla_decode_reduce(outs, outs[..., 0], reduced, indptr, *arguments)


def test_compiled_in_one_graph():
    """`mla_decode_fwd` is plain tensor code over one operator, so torch.compile takes it whole."""
    step = Step([300, 21], [2, 2], page_size=4)

    def layer(q, kv_buffer, o, *rest):
        return aiter.mla_decode_fwd(q, kv_buffer, o, *rest, page_size=4, return_lse=True)[1]

    lse = torch.compile(layer, fullgraph=True, backend="aot_eager")(*step.args)
    step.check(lse, step.expected())
