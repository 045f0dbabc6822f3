"""Every call of the two integrations could be captured in a CUDA graph: nothing crosses between host and device.

Run on tensors without data: reading one raises, and a copy from the host is seen by the dispatch mode. That a capture
and its replays then give the right numbers is for a GPU: tests/gpu/test_integrations_on_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mla_suite
from mla_suite.integrations import aiter, flash_mla, metadata_convert

BATCH, HEADS, NUM_SM_PARTS, PAGE = 3, 16, 8, 64


def on_device(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


class Copies(TorchDispatchMode):
    """Collects operations that take a tensor of the host and one of the device, or make one from the other."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, out))
        seen = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if seen == {"cpu", "meta"}:
            self.found.append(str(func))
        return out


class Literals(TorchFunctionMode):
    """Collects what torch copies from the host's memory although no tensor shows it: Python's numbers.

    Those are tensors made from lists, and a number assigned to one element or through an index tensor: on a GPU torch
    copies it and waits. Assigned to a slice, or by fill_, it is an argument of a kernel.
    """

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and out.device.type == "meta":
            self.found.append(func.__name__)
        number = func is torch.Tensor.__setitem__ and isinstance(args[2], int | float)
        if number and (isinstance(args[1], torch.Tensor) or args[0][args[1]].dim() == 0):
            self.found.append("assignment of a number")
        return out


def crossings(call):
    found = []
    with Copies(found), Literals(found):
        call()
    return found


def a_plan():
    return mla_suite.plan(on_device(BATCH), num_heads=HEADS, num_sm_parts=NUM_SM_PARTS, max_seqlen_kv=0)


def dense(metadata, num_splits=None, kv_heads=1, **options):
    q = on_device(BATCH, 2, HEADS, 576, dtype=torch.bfloat16)
    cache = on_device(9, PAGE, kv_heads, 576, dtype=torch.bfloat16)
    return flash_mla.flash_mla_with_kvcache(
        q, cache, on_device(BATCH, 4), on_device(BATCH), 512, metadata, num_splits, causal=True, **options
    )


def dense_with_a_copy():
    metadata, num_splits = flash_mla.get_mla_metadata(on_device(BATCH), HEADS, 1)
    return dense(metadata.clone(), num_splits.clone())


def sparse():
    record = on_device(9, PAGE, 1, 656, dtype=torch.uint8)
    return flash_mla.flash_mla_with_kvcache(
        on_device(BATCH, 2, HEADS, 576, dtype=torch.bfloat16), record, None, None, 512, flash_mla.get_mla_metadata()[0],
        is_fp8_kvcache=True, indices=on_device(BATCH, 2, 32), attn_sink=on_device(HEADS, dtype=torch.float32),
        topk_length=on_device(BATCH), extra_k_cache=on_device(5, 2, 1, 656, dtype=torch.uint8),
        extra_indices_in_kvcache=on_device(BATCH, 2, 8), extra_topk_length=on_device(BATCH),
    )  # fmt: skip


def sparse_prefill():
    bf16 = torch.bfloat16
    return flash_mla.flash_mla_sparse_fwd(
        on_device(7, HEADS, 576, dtype=bf16), on_device(90, 1, 576, dtype=bf16), on_device(7, 1, 32), 0.05, 512,
        on_device(HEADS, dtype=torch.float32), on_device(7),
    )  # fmt: skip


def metadata(**options):
    sizes = aiter.get_mla_metadata_info_v1(BATCH, 1, HEADS, torch.bfloat16, torch.bfloat16, "topk" in options)
    made = [on_device(*(size if isinstance(size, tuple) else (size,)), dtype=dtype) for size, dtype in sizes]
    pointers, work_indptr, work_info_set, *reduce = made
    one = on_device(BATCH + 1)
    aiter.get_mla_metadata_v1(
        one, one, on_device(BATCH), HEADS, 1, True, pointers, work_info_set, work_indptr, *reduce, **options
    )
    return pointers, work_indptr, work_info_set


def decode(page_size=16, **options):
    q, o = (on_device(BATCH, HEADS, width, dtype=torch.bfloat16) for width in (576, 512))
    buffer = on_device(9, page_size, 1, 576, dtype=torch.bfloat16)
    one = on_device(BATCH + 1)
    return aiter.mla_decode_fwd(
        q, buffer, o, one, one, on_device(20), on_device(BATCH), 1, page_size, return_lse=True, **options
    )


def decode_with_metadata(copied=False, page_size=16, **options):
    pointers, work_indptr, work_info_set = metadata(page_size=page_size, **options)
    if copied:
        work_indptr, work_info_set = work_indptr.clone(), work_info_set.clone()
    return decode(page_size, work_meta_data=pointers, work_indptr=work_indptr, work_info_set=work_info_set)


def reduce():
    fp32 = torch.float32
    aiter.mla_reduce_v1(
        on_device(40, HEADS, 512, dtype=fp32), on_device(40, HEADS, dtype=fp32), on_device(BATCH + 1),
        on_device(BATCH, 2), on_device(12), 2, 0, on_device(6, HEADS, 512, dtype=torch.bfloat16),
        on_device(6, HEADS, dtype=fp32),
    )  # fmt: skip


def uniform_reduce():
    fp32 = torch.float32
    aiter.mla_decode_reduce(
        on_device(4, 5, HEADS, 512, dtype=fp32), on_device(4, 5, HEADS, dtype=fp32),
        on_device(4, HEADS, 512, dtype=torch.bfloat16), on_device(5), 4,
    )  # fmt: skip


CALLS = {
    "flash_mla, holder": lambda: dense(flash_mla.get_mla_metadata()[0]),
    "flash_mla, pair": lambda: dense(*flash_mla.get_mla_metadata(on_device(BATCH), HEADS, 1)),
    "flash_mla, pair copied": dense_with_a_copy,
    "flash_mla, several KV heads": lambda: dense(*flash_mla.get_mla_metadata(on_device(BATCH), 8, 4), kv_heads=4),
    "flash_mla, sparse": sparse,
    "flash_mla, sparse prefill": sparse_prefill,
    "aiter, metadata": metadata,
    "aiter, decode": decode,
    "aiter, decode by splits": lambda: decode(num_kv_splits=4),
    "aiter, decode with metadata": decode_with_metadata,
    "aiter, decode with metadata copied": lambda: decode_with_metadata(copied=True),
    "aiter, decode with metadata of a selection": lambda: decode_with_metadata(page_size=1, topk=5),
    "aiter, reduce": reduce,
    "aiter, uniform reduce": uniform_reduce,
    "plan to flash_mla": lambda: metadata_convert.to_flash_mla(a_plan(), on_device(BATCH), num_sm_parts=NUM_SM_PARTS),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_crosses_between_host_and_device(name):
    assert crossings(CALLS[name]) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.zeros(2).to("meta"),
        lambda: on_device(2).copy_(torch.zeros(2)),
        lambda: on_device(2).__setitem__(0, 5),
        lambda: on_device(2).__setitem__(on_device(1), 5),
    ],
)
def test_a_crossing_is_noticed(call):
    assert crossings(call)


def test_a_read_is_noticed():
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        on_device(1).item()
