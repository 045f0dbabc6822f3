"""sparse_decode refuses bad arguments in a sentence and before anything is written."""

from __future__ import annotations

import pytest
import torch
from sparse_pools import POOLS, problem

import mla_suite


def arguments(**changes):
    q, kv_caches, indices, names = problem(POOLS["dsv4 window and compressed"], 2, 8, seed=0)
    given = {"q": q, "kv_caches": kv_caches, "indices": indices, "kv_formats": names, "softmax_scale": 0.04}
    return given | changes


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def pool_changed(at, make):
    def build():
        given = arguments()
        given["kv_caches"][at] = make()
        return given

    return build


BAD = {
    "q rank": (lambda: arguments(q=torch.zeros(8, 512)), r"q has shape \(8, 512\); it takes 3 or 4 dimensions"),
    "q dtype": (lambda: arguments(q=torch.zeros(2, 8, 512).double()), "q is float64; it takes bfloat16 or"),
    "q stride": (lambda: arguments(q=torch.zeros(2, 8, 1024)[..., ::2]), "q has strides .* last dimension must be"),
    "head_dim": (
        lambda: arguments(q=torch.zeros(2, 8, 576)),
        r"kv_caches\[0\] is read as rows of 576; kv_format 'dsv4' holds rows of 512",
    ),
    "no pools": (lambda: arguments(kv_caches=[], indices=[], kv_formats=[]), "kv_caches is empty"),
    "few kv_formats": (
        lambda: arguments(kv_formats=["dsv4"]),
        "kv_formats has 1 entries; it takes one for each of the 2",
    ),
    "few indices": (lambda: arguments(indices=[ints(2, 4)]), "indices has 1 entries; it takes one for each of the 2"),
    "unknown kv_format": (
        lambda: arguments(kv_formats=["dsv4", "dsv5"]),
        "kv_format 'dsv5' is unknown; the kv_formats are",
    ),
    "cache dtype": (
        pool_changed(1, lambda: torch.zeros(2, 4, 584)),
        r"kv_caches\[1\] is float32; kv_format 'dsv4' takes uint8",
    ),
    "cache rank": (pool_changed(0, lambda: torch.zeros(2, 4, 1, 584).byte()), r"kv_caches\[0\] has shape"),
    "cache width": (pool_changed(0, lambda: torch.zeros(2, 4, 656).byte()), r"takes \[pages, page, 584\]"),
    "cache stride": (
        pool_changed(0, lambda: torch.zeros(2, 4, 592).byte()[..., :584]),
        r"kv_caches\[0\] has strides .* exactly 584 elements apart",
    ),
    "cache device": (pool_changed(0, lambda: torch.empty(2, 4, 584, device="meta").byte()), "is on meta"),
    "misaligned cache": (
        pool_changed(0, lambda: torch.zeros(584 * 4 + 4).byte()[4:].view(1, 4, 584)),
        r"kv_caches\[0\] begins 4 bytes past a multiple of 8",
    ),
    "misaligned blocks": (
        pool_changed(0, lambda: torch.zeros(1172 * 2).byte().as_strided((2, 2, 584), (1172, 584, 1))),
        "blocks a multiple of 8 bytes apart",
    ),
    "indices dtype": (
        lambda: arguments(indices=[ints(2, 4), torch.zeros(2, 4, dtype=torch.int64)]),
        r"indices\[1\] is int64; it takes int32",
    ),
    "indices tokens": (
        lambda: arguments(indices=[ints(3, 4), ints(2, 4)]),
        r"indices\[0\] has shape \(3, 4\); it takes \[tokens, topk\] = \(2, 4\)",
    ),
    "ragged without indptr": (
        lambda: arguments(indices=[ints(4), ints(2, 4)]),
        r"indices\[0\] has shape \(4,\) and indptrs\[0\] is None",
    ),
    "indptr length": (
        lambda: arguments(indices=[ints(4), ints(2, 4)], indptrs=[ints(2), None]),
        r"indptrs\[0\] has shape \(2,\); it takes \[query tokens \+ 1\] = \(3,\)",
    ),
    "indptr and lengths": (
        lambda: arguments(indices=[ints(4), ints(2, 4)], indptrs=[ints(3), None], topk_lengths=[ints(2), None]),
        r"topk_lengths\[0\] is given with indptrs\[0\]",
    ),
    "indptr falls": (
        lambda: arguments(indices=[ints(4), ints(2, 4)], indptrs=[torch.tensor([0, 3, 2]).int(), None]),
        r"indptrs\[0\] goes from 0 to 2, smallest step -1",
    ),
    "indptr too long": (
        lambda: arguments(indices=[ints(4), ints(2, 4)], indptrs=[torch.tensor([0, 3, 5]).int(), None]),
        r"indptrs\[0\] goes from 0 to 5, .* within the 4 entries",
    ),
    "lengths shape": (lambda: arguments(topk_lengths=[ints(3), None]), r"topk_lengths\[0\] has shape \(3,\)"),
    "negative length": (
        lambda: arguments(topk_lengths=[torch.tensor([-1, 3]).int(), None]),
        r"topk_lengths\[0\] holds lengths -1\.\.3; indices\[0\] has 24 entries",
    ),
    "length too large": (lambda: arguments(topk_lengths=[None, ints(2) + 17]), r"topk_lengths\[1\] holds lengths 17"),
    "sink heads": (lambda: arguments(attn_sink=torch.zeros(4)), r"attn_sink has shape \(4,\); it takes \[heads\]"),
    "sink dtype": (lambda: arguments(attn_sink=torch.zeros(8).half()), "attn_sink is float16; it takes float32"),
    "plan dtype": (lambda: arguments(plan=torch.zeros(9)), "plan is float32; it takes int32"),
    "head_dim_v": (lambda: arguments(head_dim_v=513), r"head_dim_v is 513; V is a part of a row: 1\.\.512"),
    "scale": (lambda: arguments(softmax_scale=torch.inf), "softmax_scale is inf; it takes a finite number"),
    "num_splits": (lambda: arguments(num_splits=-1), "num_splits is -1; it takes 1"),
    "both splits": (lambda: arguments(num_splits=2, split_size=16), "num_splits is 2 with split_size=16"),
    "plan words": (lambda: arguments(plan=ints(4)), r"plan has 4 words; one for 2 sequences has at least \d+"),
    "no plan": (lambda: arguments(plan=ints(99)), "plan does not begin with"),
    "plan of a batch": (
        lambda: arguments(plan=mla_suite.plan(ints(1) + 40, num_heads=8, num_sm_parts=99, max_seqlen_kv=0)),
        "plan was made for 1 sequences; q's query tokens are 2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_sentence(case):
    make, sentence = BAD[case]
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        mla_suite.sparse_decode(**make())
    assert "\n" not in str(caught.value)
