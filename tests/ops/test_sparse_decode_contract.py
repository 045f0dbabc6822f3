"""sparse_decode refuses bad arguments in a sentence and before anything is written."""

import pytest
import torch
from sparse_problems import problem

import mla_suite


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def record(*shape):
    return zeros(*shape, dtype=torch.uint8)


TWO = zeros(2, 4)
RAGGED = [zeros(4), TWO]
PLAN_OF_ONE = mla_suite.plan(ints(40), num_heads=8, num_sm_parts=99, max_seqlen_kv=0)
FP8 = dict(
    q=torch.zeros(2, 8, 512).to(torch.float8_e4m3fn), kv_caches=[record(2, 4, 512)] * 2, kv_formats=["fp8", "fp8"]
)
# What is changed in a call of two pools, where a pair (position, cache) changes one of its caches, and the error.
BAD = [
    (dict(q=torch.zeros(8, 512)), r"q has shape \(8, 512\); it takes 3 or 4 dimensions: \[tokens"),
    (dict(q=torch.zeros(2, 8, 512).double()), "q is float64; it takes bfloat16, "),
    (dict(q=torch.zeros(2, 8, 1024)[..., ::2]), "q has strides .* last dimension must be"),
    (dict(q=torch.zeros(2, 8, 576)), r"kv_caches\[0\] is read as rows of 576; kv_format 'dsv4' holds rows of 512"),
    (dict(kv_caches=[], indices=[], kv_formats=[]), "kv_caches is empty"),
    (dict(kv_formats="dsv4"), "kv_caches and kv_formats are a list and a str; each is a list, one entry per pool"),
    (dict(kv_formats=["dsv4"]), "kv_formats has 1 entries; it takes one for each of the 2"),
    (dict(indices=[TWO]), "indices has 1 entries; it takes one for each of the 2"),
    (dict(kv_formats=["dsv4", "dsv5"]), "kv_format 'dsv5' is unknown; the kv_formats are"),
    ((1, torch.zeros(2, 4, 584)), r"kv_caches\[1\] is float32; kv_format 'dsv4' takes uint8"),
    ((0, record(2, 4, 1, 584)), r"kv_caches\[0\] has shape"),
    ((0, record(2, 4, 656)), r"takes \[num_pages, page_size, 584\]"),
    ((0, record(2, 4, 592)[..., :584]), r"kv_caches\[0\] has strides .* exactly 584 elements apart"),
    ((0, record(584 * 4 + 4)[4:].view(1, 4, 584)), r"kv_caches\[0\] begins 4 bytes past a multiple of 8"),
    ((0, record(1172 * 2).as_strided((2, 2, 584), (1172, 584, 1))), "blocks a multiple of 8 bytes apart"),
    (dict(indices=[TWO, TWO.long()]), r"indices\[1\] is int64; it takes int32"),
    (dict(indices=[zeros(3, 4), TWO]), r"indices\[0\] has shape \(3, 4\); it takes \[tokens, topk\] = \(2, 4\)"),
    (dict(indices=RAGGED), r"indices\[0\] has shape \(4,\) and indptrs\[0\] is None"),
    (dict(indices=RAGGED, indptrs=[zeros(2), None]), r"indptrs\[0\] has shape \(2,\); it takes .* = \(3,\)"),
    (
        dict(indices=RAGGED, indptrs=[zeros(3), None], topk_lengths=[zeros(2), None]),
        r"topk_lengths\[0\] is given with indptrs\[0\]",
    ),
    (dict(indices=RAGGED, indptrs=[ints(0, 3, 2), None]), r"indptrs\[0\] goes from 0 to 2, smallest step -1"),
    (dict(indices=RAGGED, indptrs=[ints(0, 3, 5), None]), r"indptrs\[0\] goes from 0 to 5, .* within the 4 entries"),
    (dict(topk_lengths=[zeros(3), None]), r"topk_lengths\[0\] has shape \(3,\)"),
    (
        dict(topk_lengths=[ints(-1, 3), None]),
        r"topk_lengths\[0\] holds lengths -1\.\.3; indices\[0\] has 24 entries",
    ),
    (dict(topk_lengths=[None, ints(17, 17)]), r"topk_lengths\[1\] holds lengths 17"),
    (dict(attn_sink=torch.zeros(4)), r"attn_sink has shape \(4,\); it takes \[heads\]"),
    (dict(attn_sink=torch.zeros(8).half()), "attn_sink is float16; it takes float32"),
    (dict(plan=torch.zeros(9)), "plan is float32; it takes int32"),
    (
        dict(q_descale=torch.ones(1)),
        "q_descale is given with queries of bfloat16; it multiplies float8 ones: pass None",
    ),
    (dict(kv_descale=torch.ones(1)), "kv_descale was given with kv_format 'dsv4'; only fp8, fp8_fnuz read one: pass"),
    (FP8 | dict(q_descale=torch.ones(2)), r"q_descale has shape \(2,\); it takes one value: shape \[\] or \[1\]"),
    (FP8 | dict(kv_descale=torch.ones(2)), r"kv_descale has shape \(2,\); it takes one value: shape \[\] or \[1\]"),
    (
        FP8
        | dict(kv_caches=[record(2, 4, 512), record(2, 4, 584)], kv_formats=["fp8", "dsv4"], kv_descale=torch.ones(1)),
        "kv_descale was given with kv_format 'dsv4'",
    ),
    (FP8 | dict(q_descale=torch.tensor(-1.0)), "q_descale is -1; it takes a finite number, 0 or more"),
    (FP8 | dict(kv_descale=torch.tensor(torch.inf)), "kv_descale is inf; it takes a finite number, 0 or more"),
    (dict(head_dim_v=0), r"head_dim_v is 0; V is a part of a row: 1\.\.512"),
    (dict(head_dim_v=513), r"head_dim_v is 513; V is a part of a row: 1\.\.512"),
    (dict(softmax_scale=torch.inf), "softmax_scale is inf; it takes a finite number"),
    (dict(num_splits=-1), "num_splits is -1; it takes 1"),
    (dict(num_splits=2, split_size=16), "num_splits is 2 with split_size=16"),
    (dict(plan=zeros(4)), r"plan has 4 words; one for 2 sequences has at least \d+"),
    (dict(plan=zeros(99)), "plan does not begin with"),
    (dict(plan=PLAN_OF_ONE), "plan was made for 1 sequences; q's query tokens are 2"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_input_is_refused_in_a_sentence(change, sentence):
    (q, kv_caches, indices, *_), options = problem([("dsv4", 2, 64, 24), ("dsv4", 30, 2, 16)], 2, 8)
    given = {"q": q, "kv_caches": kv_caches, "indices": indices, **options}
    if isinstance(change, tuple):
        kv_caches[change[0]] = change[1]
    else:
        given |= change
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        mla_suite.sparse_decode(**given)
    assert "\n" not in str(caught.value)
