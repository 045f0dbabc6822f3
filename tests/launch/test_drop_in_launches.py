"""FlashMLA's interface enqueues what the operator under it enqueues, and nothing else: over a recording CUDA driver.

CPU tensors stand for those of an H200: launches go to a library that records them, and nothing is computed.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from observers import Operators

import mla_suite
from mla_suite.build.params import load
from mla_suite.integrations import aiter
from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import tensor_map
from mla_suite.ops.sparse_decode import max_logits as max_logits_by_torch

INT32 = {"dtype": torch.int32}
MEMORY_ALONE = ("aten::empty", "aten::view", "aten::transpose", "aten::squeeze", "aten::new_empty", "aten::detach")


@pytest.fixture
def launched(h200, monkeypatch):
    """The launches, whose tensor maps are addresses, so that those of a copy are others."""
    monkeypatch.setattr(tensor_map, "swizzled", lambda address, *rest: (address,) + (0,) * (tensor_map.WORDS - 1))
    with torch.inference_mode():
        yield h200


def dense(batch, heads, q_len, pages=4):
    """(arguments of the interface, the operator's call of the same)."""
    q = torch.zeros(batch, q_len, heads, 576).bfloat16()
    cache = torch.zeros(batch * pages, 64, 1, 576).bfloat16()
    lens, table = torch.full((batch,), 100, **INT32), torch.zeros(batch, pages, **INT32)
    holder, _ = get_mla_metadata()
    face = partial(flash_mla_with_kvcache, q, cache, table, lens, 512, holder, None, 0.1, True)
    face()
    plan = holder.tile_scheduler_metadata
    own = partial(mla_suite.decode, q, cache.squeeze(2), lens, table, plan=plan, softmax_scale=0.1)
    return face, own


def sparse(record, heads):
    kind = get_kv_format(record)
    q = torch.zeros(2, 2, heads, kind.head_dim).bfloat16()
    pools, index = [caches.empty(kind, 8, page) for page in (64, 2)], torch.zeros(2, 2, 256, **INT32)
    count = 1 if record == "v32" else 2
    extra = {} if count == 1 else dict(extra_k_cache=pools[1].unsqueeze(2), extra_indices_in_kvcache=index)
    holder, _ = get_mla_metadata()
    face = partial(
        flash_mla_with_kvcache,
        q,
        pools[0].unsqueeze(2),
        None,
        None,
        512,
        holder,
        None,
        0.1,
        False,
        True,
        index,
        **extra,
    )
    formats = [record] * count
    own = partial(mla_suite.sparse_decode, q, pools[:count], [index] * count, kv_formats=formats, softmax_scale=0.1)
    return face, own


CALLS = {
    "dense": partial(dense, 4, 16, 1),
    "dense, one sequence": partial(dense, 1, 128, 1),
    "dense, several query tokens": partial(dense, 8, 32, 4),
    "dense, pages of many sequences": partial(dense, 200, 16, 1),
    "v32": partial(sparse, "v32", 64),
    "dsv4": partial(sparse, "dsv4", 128),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_same_launches(launched, call):
    """The same kernels with the same numbers, but for what says where lse lies and what an empty row has."""
    face, own = CALLS[call]()
    for _ in range(3):
        face(), own()
    launched.clear()
    out, lse = face()
    mine = launched[:]
    launched.clear()
    own()
    assert [name for name, *_ in mine] == [name for name, *_ in launched] != []
    assert lse.is_contiguous()
    q_len = lse.shape[2]
    for (name, _, params), (_, _, others) in zip(mine, launched, strict=True):
        kernel = "combine" if "combine" in name else f"{name.split('_dtype')[0].split('_kvformat')[0]}_tma"
        struct = load(kernel)
        read, plain = struct.unpack(params), struct.unpack(others)
        differ = {field for field in read if read[field] != plain[field]} - {
            f.name for f in struct.fields if f.is_pointer
        }
        where = {"lse_token_stride", "lse_head_stride", "lse_batch_stride", "lse_tokens_reciprocal", "lse_tokens_shift"}
        assert differ <= where | {"empty_lse"}
        assert (read["empty_lse"], plain["empty_lse"]) == (float("inf"), float("-inf"))
        assert read["lse"] == lse.data_ptr()
        assert name != mine[-1][0] or read["out"] == out.data_ptr()
        assert (read["lse_head_stride"], plain["lse_head_stride"]) == (q_len, 1)


@pytest.mark.parametrize(("tokens", "kernels"), [(200, ["sparse_decode"]), (2, ["sparse_decode", "combine"])])
@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize("way", ["eager", "compiled", "observed"])
def test_prefill_takes_max_logits_from_the_kernel(launched, monkeypatch, way, width, tokens, kernels):
    """From the first call on, with queries split or not; torch makes no second pass over the keys."""
    q, kv = torch.zeros(tokens, 64, width).bfloat16(), torch.zeros(90, 1, width).bfloat16()
    indices, call, graphs = torch.zeros(tokens, 1, 2048, **INT32), flash_mla_sparse_fwd, []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    if way == "compiled":
        call = torch.compile(flash_mla_sparse_fwd, fullgraph=True, backend=keep)
    monkeypatch.setattr(max_logits_by_torch, "largest_scores", None)
    with Operators() if way == "observed" else nullcontext():
        for _ in range(2):
            out, max_logits, lse = call(q, kv, indices, 0.1)
    if way == "compiled":
        (targets,) = graphs
        assert [name for name in targets if "getitem" not in name] == ["squeeze", "mla_suite.sparse_decode.max_logits"]
    assert [name.split("_kvformat")[0].split("_dv")[0] for name, *_ in launched] == kernels * 2
    read = load("sparse_decode_tma").unpack(launched[len(kernels)][-1])
    written = {"out": out, "max_logits": max_logits, "lse": lse}
    assert {name: read[name] for name in written} == {name: tensor.data_ptr() for name, tensor in written.items()}
    assert (read["empty_lse"], tuple(max_logits.shape), max_logits.dtype) == (float("inf"), (tokens, 64), torch.float32)
    assert bool((max_logits == float("-inf")).all()), "a kernel raises what is there"


def names_of(ran):
    return [func._schema.name for func in ran.seen]


@pytest.mark.parametrize("call", CALLS)
def test_no_operation_of_torch_beside(launched, call):
    """A call that something watches goes through the dispatcher: all it asks of torch is memory and views."""
    face, _ = CALLS[call]()
    face()
    with Operators() as ran:
        face()
    others = [name for name in names_of(ran) if not name.startswith(MEMORY_ALONE)]
    assert len(others) == 1, others
    assert others[0] in ("mla_suite::decode", "mla_suite::sparse_decode")


@pytest.mark.parametrize(
    ("page", "lengths"),
    [(1, ["aten::diff"]), (64, ["aten::diff", "aten::gt", "aten::sub", "aten::add", "aten::where"])],
)
def test_aiter_adds_what_makes_lengths_of_its_page_counts(launched, page, lengths):
    """AITER's call has no lengths, which decode takes; out is written in place, and lse is nobody's copy."""
    q, o = torch.zeros(4, 16, 576).bfloat16(), torch.zeros(4, 16, 512).bfloat16()
    cache, indices = torch.zeros(512, page, 1, 576).bfloat16(), torch.arange(512, **INT32)
    indptr, last = torch.arange(5, **INT32) * 128, torch.full((4,), page, **INT32)
    call = partial(
        aiter.mla_decode_fwd, q, cache, o, torch.arange(5, **INT32), indptr, indices, last, 1, page, num_kv_splits=4
    )
    call()
    launched.clear()
    with Operators() as ran:
        call()
    kernels = [name for name in names_of(ran) if not name.startswith((*MEMORY_ALONE, "aten::to"))]
    assert kernels == [*lengths, "mla_suite::decode"]
    assert [name.split("_")[0] for name, *_ in launched] == ["decode", "combine"]
