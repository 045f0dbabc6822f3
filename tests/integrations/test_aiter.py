"""Scripts from AITER's documentation and its callers, run on `mla_suite.integrations.aiter`, against the formula."""

import ctypes
import functools
import inspect
import itertools

import pytest
import torch
from aiter_steps import MADE, Step, attend
from backend_calls import Asked

from mla_suite.integrations import aiter

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


def test_reduce_decode_is_decode():
    """The entry of AITER's reduce-only decode takes the arguments of mla_decode_fwd."""
    step = Step([200, 3], [1, 2])
    _, lse = aiter.mla_reduce_decode(*step.args, num_kv_splits=4, return_lse=True)
    step.check(lse, step.expected())


def test_the_splits_of_a_call_are_those_of_the_operator():
    """They change no result beyond rounding; metadata has its own."""
    step = Step([200, 3], [1, 1])
    with Asked(torch.ops.mla_suite.decode.out, "num_splits", 0) as asked:
        aiter.mla_decode_fwd(*step.args)
        aiter.mla_decode_fwd(*step.args, num_kv_splits=3)
        aiter.mla_reduce_decode(*step.args, num_kv_splits=4)
        aiter.mla_decode_fwd(*step.args, num_kv_splits=3, **step.metadata(16))
    assert asked.values == [0, 3, 4, 0]


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
    made = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in zip(MADE, sizes, strict=True)}
    step.fill(made, page_size=1, max_seqlen_qo=1, uni_seqlen_qo=1, max_split_per_batch=32, topk=topk)
    return made


def selection(step, topk):
    """kv_indices [tokens, topk], whose rows end in anything where a sequence is shorter, and the results by them."""
    chosen, expected = torch.full((step.total, topk), 2**31 - 1, dtype=torch.int32), []
    owners = [b for b, q_len in enumerate(step.q_lens) for _ in range(q_len)]
    for token, b in enumerate(owners):
        rows = torch.randperm(step.kv_lens[b])[:topk]
        chosen[token, : len(rows)] = step.kv_indices[step.kv_indptr[b] + rows]
        expected.append(attend(step.q[token], step.keys(b)[rows], 0.05))
    return chosen.view(-1), tuple(torch.stack(part) for part in zip(*expected, strict=True))


@pytest.mark.parametrize(
    ("lens", "q_lens", "topk"),
    [
        ([200, 0, 40, 65], [1] * 4, 64),
        ([200, 0, 40, 65], [3] * 4, 64),
        ([200], [3], 64),
        ([200, 7, 40, 65], [1, 4, 0, 3], 64),  # AITER itself takes as many query tokens of each sequence
        ([9, 200], [3, 2], 64),
        ([200, 9], [2, 2], 0),  # whose metadata is not that of a dense step
    ],
    ids=str,
)
def test_selected_keys_by_metadata_with_topk(lens, q_lens, topk):
    step = Step(lens, q_lens)
    made = sparse_metadata(step, max(q_lens), topk)  # for more query tokens than there are, where they differ
    chosen, expected = selection(step, topk)
    arguments = (*step.args[:5], chosen, step.kv_last_page_lens, 1, 1, 1, 0.05)
    _, lse = aiter.mla_decode_fwd(*arguments, num_kv_splits=32, return_lse=True, **made)
    step.check(lse, expected)

    works = made["work_info_set"][: int(made["work_indptr"][-1])].tolist()
    for sequence, (length, q_len) in enumerate(zip(lens, q_lens, strict=True)):
        for i in range(q_len):
            token = int(step.qo_indptr[sequence]) + i
            mine = [work for work in works if work[2] == token]
            assert {(work[0], work[3]) for work in mine} == {(sequence, token + 1)}
            # As AITER counts what lies behind: keys of the selection, and one for each later query token.
            assert [work[6] for work in mine] == [mine[-1][5] - work[5] + q_len - 1 - i for work in mine]
            assert (mine[0][4], mine[-1][5]) == (token * topk, token * topk + min(length, topk))
            assert all(left[5] == right[4] for left, right in itertools.pairwise(mine))

    # the same buffers planned densely select no more
    step.fill(made)
    _, lse = aiter.mla_decode_fwd(*step.args, return_lse=True, **made)
    step.check(lse, step.expected())


def test_query_tokens_of_no_sequence_select_nothing():
    """Such as pad a captured step to its batch."""
    step = Step([200, 40], [1, 2])
    made = sparse_metadata(step, 2, 16)
    chosen, expected = selection(step, 16)
    q, o = torch.cat((step.q, step.q)), torch.full((6, 16, 512), torch.nan, dtype=torch.bfloat16)
    chosen = torch.cat((chosen, torch.full_like(chosen, 2**31 - 1)))
    arguments = (q, step.kv_buffer, o, step.qo_indptr, step.kv_indptr, chosen, step.kv_last_page_lens, 1, 1, 1, 0.05)
    _, lse = aiter.mla_decode_fwd(*arguments, return_lse=True, **made)
    step.o = o[:3]
    step.check(lse[:3], expected)
    assert bool((o[3:] == 0).all() & (lse[3:] == -torch.inf).all())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("q_len", [1, 2])
def test_metadata_that_aiter_made_is_not_taken_for_dense_where_it_selects(q_len, inference):
    """It says topk nowhere, but its works do not cover the keys; dense ones do, and are read."""
    with torch.inference_mode(inference):
        step = Step([200, 9, 40, 65], [q_len] * 4)
        dense, made = step.metadata(), sparse_metadata(step, q_len, 16)
        for buffers in (dense, made):
            buffers["work_info_set"] = buffers["work_info_set"].clone()
            buffers["work_info_set"][:, -1] = 0  # as AITER leaves it
        _, lse = aiter.mla_decode_fwd(*step.args, return_lse=True, **dense)
        step.check(lse, step.expected())
        step.o.fill_(torch.nan)
        with pytest.raises(ValueError, match=r"work_info_set ends at page \d+ and kv_indptr at 314; .* selects keys"):
            aiter.mla_decode_fwd(*step.args, **made)
    assert bool(step.o.isnan().all()), "written although refused"


def anything(shape):
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


@pytest.mark.parametrize("unfilled", [anything, functools.partial(torch.zeros, dtype=torch.int32)], ids=["any", "0"])
def test_lists_that_nobody_filled_are_no_selection(unfilled):
    """As an engine's warm-up passes them; what AITER's planner then writes counts as no write of torch's."""
    step = Step([200, 9], [1, 1])
    made, selecting = step.metadata(), sparse_metadata(step, 1, 16)
    made |= {name: unfilled(made[name].shape) for name in ("work_indptr", "work_info_set")}
    _, lse = aiter.mla_decode_fwd(*step.args, return_lse=True, **made)
    step.check(lse, step.expected())
    selecting["work_info_set"][:, -1] = 0
    for name in ("work_indptr", "work_info_set"):
        ctypes.memmove(made[name].data_ptr(), selecting[name].data_ptr(), made[name].nbytes)
    with pytest.raises(ValueError, match="it selects keys"):
        aiter.mla_decode_fwd(*step.args, **made)


def cloned(info):
    return info.clone()


def without_its_last_rows(info):
    return info[:-3]


def copied(info):
    return torch.zeros_like(info).copy_(info)


def copied_over_dense(info):
    """A tensor that get_mla_metadata_v1 filled densely before, as a server's double buffer."""
    step = Step([200, 0, 40, 65], [1] * 4)
    buffers = sparse_metadata(step, 1, -1)
    return buffers["work_info_set"].copy_(info[: buffers["work_info_set"].shape[0]])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", [cloned, without_its_last_rows, copied, copied_over_dense])
def test_metadata_means_the_same_when_it_is_copied(change, inference):
    """The selection is what the data says, whichever tensor holds it."""
    topk = 16
    with torch.inference_mode(inference):
        step = Step([200, 0, 40, 65], [1] * 4)
        made = sparse_metadata(step, 1, topk)
        chosen, expected = selection(step, topk)
        made["work_info_set"] = change(made["work_info_set"])
        arguments = (*step.args[:5], chosen, step.kv_last_page_lens, 1, 1, 1, 0.05)
        for _ in range(2):
            _, lse = aiter.mla_decode_fwd(*arguments, return_lse=True, **made)
            step.check(lse, expected)


@pytest.mark.parametrize("inference", [False, True])
def test_dense_metadata_copied_over_a_selection(inference):
    with torch.inference_mode(inference):
        step = Step([200, 0, 40, 65], [1] * 4)
        made, dense = sparse_metadata(step, 1, 16), sparse_metadata(step, 1, -1)
        for name, buffer in made.items():
            buffer.copy_(dense[name])
        _, lse = aiter.mla_decode_fwd(*step.args, return_lse=True, **made)
        step.check(lse, step.expected())


def test_compiled_steps_refuse_a_selection():
    """Traced code cannot ask the data on the host, and must not attend densely to what is a selection."""
    step = Step([200, 9], [1, 1])
    run = torch.compile(
        lambda made: aiter.mla_decode_fwd(*step.args, return_lse=True, **made)[1], fullgraph=True, backend="aot_eager"
    )
    step.check(run(sparse_metadata(step, 1, -1)), step.expected())
    with pytest.raises(RuntimeError, match="work_info_set was made with another topk"):
        run(sparse_metadata(step, 1, 16))


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
        theirs = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]  # the others are additions of ours
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in theirs]
        assert shown == expected.split(), name
    assert aiter.mla.mla_decode_fwd is aiter.mla_decode_fwd


def test_what_is_absent_says_so():
    from mla_suite.integrations.aiter import mla_decode_fwd_v4_nm

    with pytest.raises(NotImplementedError, match=r"mla_decode_fwd_v4_nm: .*call mla_suite.sparse_decode"):
        mla_decode_fwd_v4_nm(1, sink=2)
    with pytest.raises(AttributeError, match="has no attribute 'mla_decode_forward'"):
        aiter.mla_decode_forward  # noqa: B018  the look-up is what is tested


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic):
    """`mla_decode_fwd` is plain tensor code over one operator, so torch.compile takes it whole."""

    def layer(q, kv_buffer, o, *rest):
        *rest, page_size = rest
        return aiter.mla_decode_fwd(q, kv_buffer, o, *rest, page_size=page_size, return_lse=True)[1]

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for q_len, page_size in ((2, 4), (3, 8)):
        step = Step([300, 21], [q_len] * 2, page_size=page_size)
        step.check(compiled(*step.args, page_size), step.expected())
