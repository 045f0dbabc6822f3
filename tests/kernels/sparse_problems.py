"""Hostile sparse_decode problems for every backend, and their results in fp64."""

from __future__ import annotations

import torch
from built import require_built
from hostile_inputs import ABSURD, poisoned

import mla_suite
from mla_suite import archs
from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.gfx942 import SparseConfig as Gfx942
from mla_suite.archs.gfx950 import SparseConfig as Gfx950
from mla_suite.core import dispatch
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import current_arch
from mla_suite.ops.decode import Q_FP8
from mla_suite.ops.sparse_decode import SPARSE_DECODE
from mla_suite.testing import Exact, attention

CONFIGS: dict[str, type[CdnaSparseConfig]] = {config.arch_name: config for config in (Gfx942, Gfx950)}
"""An arch that can be emulated -> the configuration of its kernels."""


def require_kernels(arch):
    """Skips the test where the kernels of an arch are not built."""
    config = CONFIGS[arch](archs.get(arch), "dsv4", 16)
    require_built(arch, config.instance)


def kind_of(name, width):
    kind = get_kv_format(name)
    return kind.sized(width, 0) if kind.dense else kind


def problem(pools, tokens, heads, seed=0, invalid=0.2, padded=True, spread=2, width=0, dtype=torch.bfloat16):
    """Queries, poisoned caches and dense indices, some repeated, some absurd. pools: (kv_format, pages, page, topk).

    width  values of dense rows; 0: 576 of up to two pools, else 512; 160: 128 of them are values of V
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    widths = {get_kv_format(name).head_dim for name, *_ in pools if not get_kv_format(name).dense}
    width = widths.pop() if widths else width or (512 if len(pools) > 2 else 576)
    q = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    kv_caches, indices = [], []
    for i, (name, pages, page, topk) in enumerate(pools):
        slots = pages * page
        index = torch.randint(0, max(slots, 1), (tokens, topk), generator=generator)
        absurd = torch.tensor([*ABSURD, slots])[torch.randint(0, 5, (tokens, topk), generator=generator)]
        index = torch.where(torch.rand(tokens, topk, generator=generator) < invalid, absurd, index).int()
        used = {slot for slot in index.flatten().tolist() if 0 <= slot < slots}
        kv_caches.append(poisoned(name, pages, page, used, seed + i, width, padded, spread))
        indices.append(index)
    names = [name for name, *_ in pools]
    args = [q, kv_caches, indices, [None] * len(pools), [None] * len(pools), None, None]
    return args, {"kv_formats": names, "softmax_scale": width**-0.5, "head_dim_v": 128 if width == 160 else 512}


def exact(
    q,
    kv_caches,
    indices,
    indptrs,
    lengths,
    sink,
    plan=None,
    q_descale=None,
    kv_descale=None,
    *,
    kv_formats,
    softmax_scale,
    head_dim_v=512,
    rounded=True,
    **choices,
):
    """fp64, each query token over its keys; `rounded`: those of arbitrary scales as the bf16 that they become."""
    q_len = q.shape[1] if q.dim() == 4 else 1
    heads = q.shape[-2]
    sinks = torch.full((heads,), -torch.inf) if sink is None else sink
    found = []
    for t, query in enumerate(q.flatten(0, -3)):
        keys = []
        for name, cache, index, indptr, length in zip(kv_formats, kv_caches, indices, indptrs, lengths, strict=True):
            chosen = index[indptr[t] : indptr[t + 1]] if indptr is not None else index.flatten(0, -2)[t]
            if length is not None:
                chosen = chosen[
                    : int(length[t // q_len]) if q.dim() == 4 and length.dim() == 1 else length.flatten()[t]
                ]
            valid = chosen[(chosen >= 0) & (chosen < cache.shape[0] * cache.shape[1])].long()
            rows = caches.gather(kind_of(name, q.shape[-1]), cache, valid)
            keys.append(rows.bfloat16().float() if rounded else rows)
        every, query = torch.cat(keys).double(), query.double()
        if kv_descale is not None:
            every *= kv_descale
        if q_descale is not None:
            query = query * q_descale
        found.append(
            attention(query, every, torch.ones(heads, len(every), dtype=torch.bool), softmax_scale, head_dim_v, sinks)
        )
    out, lse, magnitude = (torch.stack(parts) for parts in zip(*found, strict=True))
    rows = q.shape[:-1]
    return Exact(out.view(*rows, head_dim_v), lse.view(rows), magnitude.view(*rows, head_dim_v))


def attend(args, kwargs):
    """Runs the native kernels of the arch that is emulated and nothing else."""
    facts = SPARSE_DECODE.problem(*args, **kwargs)
    choice = dispatch.choose("sparse_decode", SPARSE_DECODE.backends, facts, current_arch(args[0]), "cpu")
    assert choice.backend.name == "native", str(choice)
    return torch.ops.mla_suite.sparse_decode(*args, **kwargs)


POOLS = {
    "v4": [("dsv4", 2, 64, 70), ("dsv4", 40, 2, 45)],
    "v32": [("v32", 3, 64, 130)],
    "v32 pow2": [("v32_pow2", 5, 16, 97), ("v32_pow2", 2, 64, 1)],
    "both scales": [("v32", 2, 64, 33), ("v32_pow2", 3, 16, 40)],
    "bf16": [("bf16", 3, 61, 100)],
    "three pools": [("dsv4", 1, 256, 40), ("dsv4", 9, 1, 7), ("dsv4", 3, 16, 65)],
    "four pools": [("bf16", 3, 16, 20), ("bf16", 3, 1, 3), ("bf16", 2, 64, 50), ("bf16", 1, 7, 9)],
}
SPLIT_V41_POOLS = {
    "v4.1 of both sizes": [("v41", 2, 64, 70), ("v41_fp4", 9, 16, 97)],
    "v32 without rope": [("v32_nope", 3, 64, 130)],
    "v4.1 of sizes in turn": [("v41_fp4", 1, 256, 3), ("v41", 9, 1, 7), ("v41_fp4", 3, 16, 20), ("v41", 2, 61, 33)],
}
V41_POOLS = SPLIT_V41_POOLS | {
    "v4.1": [("v41", 2, 64, 70), ("v41", 20, 5, 45)],
    "v4.1 of 288 bytes": [("v41_fp4", 3, 61, 130)],
    "v4.1 interleaved": [("v41_vllm", 2, 32, 37), ("v41_fp4_interleaved", 9, 7, 45)],
    "v4.1 of every kind": [
        *(("v41_fp4", 1, 256, 40), ("v41", 9, 1, 7), ("v41_fp4_interleaved", 3, 16, 65), ("v41_interleaved", 2, 16, 3)),
    ],
}
FP8_POOLS = {
    "fp8 rows": [("fp8", 3, 64, 130), ("fp8", 20, 5, 45)],
    "fp8 rows without rope": [("fp8", 3, 61, 100), ("fp8", 9, 1, 7), ("fp8", 3, 16, 65)],
}
FNUZ_POOLS = {
    "v4 in fnuz": [("dsv4_fnuz", 2, 64, 70), ("dsv4_fnuz", 40, 2, 45)],
    **{f"{what} in fnuz": [(f"{name}_fnuz", *sizes) for name, *sizes in pools] for what, pools in FP8_POOLS.items()},
}


def pools_of(arch):
    """Pools that the kernels of an arch read."""
    found = POOLS | SPLIT_V41_POOLS
    return found | (FNUZ_POOLS if ("dsv4_fnuz", 512) in CONFIGS[arch].records else FP8_POOLS)


def with_descales(args, seed, q_dtype=torch.bfloat16):
    """The arguments of rows in per-tensor fp8, with a descale of theirs and, of queries in fp8, one of these."""
    q, *others = args
    generator = torch.Generator().manual_seed(seed)
    kv_descale, q_descale = torch.rand(2, generator=generator) * 0.4 + 0.02
    return [q.to(q_dtype), *others, q_descale.view(1) if q_dtype in Q_FP8 else None, kv_descale]


MODES = ("one split", "splits and sink", "planned", "invariant", "ragged", "lengths and sink", "mtp")


def in_mode(mode, args, kwargs, seed):
    """The problem's six tokens as the mode gives them."""
    q, _, indices, indptrs, lengths = args[:5]
    generator = torch.Generator().manual_seed(seed)
    if "sink" in mode:
        args[5] = torch.randn(q.shape[1], generator=generator)
    if mode in ("one split", "mtp"):
        kwargs["num_splits"] = 1
    elif mode == "splits and sink":
        kwargs["num_splits"] = 3
    elif mode == "invariant":
        kwargs["split_size"] = 64
    elif mode == "ragged":
        keep = [torch.randint(0, index.shape[1] + 1, (len(q),), generator=generator) for index in indices]
        indptrs[:] = [torch.cat([torch.zeros(1), n.cumsum(0)]).int() + 3 for n in keep]
        for i, (index, n) in enumerate(zip(indices, keep, strict=True)):
            indices[i] = torch.cat([torch.full((3,), 1).int(), *[row[:k] for row, k in zip(index, n, strict=True)]])
    elif mode == "lengths and sink":
        lengths[:] = [torch.randint(0, index.shape[1] + 1, (len(q),), generator=generator).int() for index in indices]
    if mode == "planned":
        keys = torch.full((len(q),), sum(index.shape[1] for index in indices), dtype=torch.int32)
        args[6] = mla_suite.plan(keys, num_heads=q.shape[1], num_sm_parts=7, max_seqlen_kv=0)
    if mode == "mtp":
        args[0] = q.view(-1, 2, *q.shape[1:])
        indices[:] = [index.view(len(q) // 2, 2, index.shape[-1]) for index in indices]
        lengths[0] = torch.randint(0, indices[0].shape[-1] + 1, (len(q) // 2,), generator=generator).int()
