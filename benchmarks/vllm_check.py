"""Attention of a vLLM engine, beside its definition in fp32 over the engine's own caches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from definition import attended, relative
from vllm_model import Contexts, Row, Split, generate

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

MAX_ERROR = 1e-2  # of an attention output, relative to its norm: twice what rounding to bf16 leaves
SAMPLED = 6  # tokens of a call that selects keys
KV_FORMATS = {"auto": "bf16", "bfloat16": "bf16", "fp8_ds_mla": "v32"}
V4 = get_kv_format("dsv4")
Errors = list[tuple[str, float]]  # of which call, and the relative error


def attention_layers(process: Any) -> list[Any]:
    context = process.vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if hasattr(getattr(layer, "impl", None), "forward_mqa")]


@contextlib.contextmanager
def watched(llm: Any, model: str, split: Split | None = None) -> Iterator[Errors]:
    """Errors of calls in eager steps until the block ends; AssertionError then, unless there are some, all small.

    Of V3 all sequences with absorbed weights, in the first and the last layer; else samples of every call's tokens.
    """
    errors: Errors = []
    with contextlib.ExitStack() as stack:
        if model == "v4":
            kernels = import_module("vllm.models.deepseek_v4.nvidia.flashmla")
            for name, wrap in (("flash_mla_with_kvcache", _of_decode), ("flash_mla_sparse_fwd", _of_prefill)):
                stack.enter_context(mock.patch.object(kernels, name, wrap(getattr(kernels, name), errors)))
        else:
            layers = llm.collective_rpc(attention_layers)[0]
            for layer in layers if model == "v32" else (layers[0], layers[-1]):
                compared = _of_v32(layer, errors) if model == "v32" else _of_v3(layer, errors, split)
                stack.enter_context(mock.patch.object(layer.impl, "forward_mqa", compared))
        yield errors
    worst = max((error for _, error in errors), default=float("nan"))
    if not worst <= MAX_ERROR:
        raise AssertionError(f"attention differs from its definition by {worst:.1e} in {len(errors)} comparisons")


def check(llm: Any, model: str, lengths: Sequence[int], split: Split | None = None) -> Row:
    """Greedy tokens of prompts that arrive one by one, the best two log-probabilities, and attention's worst error."""
    Contexts.filled = False
    with watched(llm, model, split) as errors:
        answers = generate(llm, lengths)
    for kind, count in sorted(Counter(kind for kind, _ in errors).items()):
        print(f"    {kind}: {count} results, {max(error for k, error in errors if k == kind):.1e}", flush=True)
    return {"compared": len(errors), "error": max(error for _, error in errors), **answers}


def _followed(call: Callable[..., Any], compare: Callable[..., None]) -> Callable[..., Any]:
    """The call, and behind it `compare` of its result and its arguments, unless a graph captures it."""

    def compared(*args: Any, **given: Any) -> Any:
        result = call(*args, **given)
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            compare(result, *args, **given)
        return result

    return compared


def _joined(q: Any) -> torch.Tensor:
    return torch.cat(q, dim=-1) if isinstance(q, tuple) else q


def _of_v3(layer: Any, errors: Errors, split: Any) -> Callable[..., Any]:
    def compare(result: Any, q: Any, cache: torch.Tensor, metadata: Any, module: Any) -> None:
        queries, step = _joined(q), split.step
        starts = step.query_start_loc_cpu[: metadata.num_decodes + 1].tolist()
        for b, (start, end) in enumerate(pairwise(starts)):
            length = int(step.seq_lens[b])
            pages = step.block_table_tensor[b, : -(-length // cache.shape[1])]
            keys = cache[pages.long()].flatten(0, 1)[:length]
            expected = attended(queries[start:end], keys, layer.impl.scale)
            errors.append(("absorbed", relative(result[0][start:end], expected)))

    return _followed(layer.impl.forward_mqa, compare)


def _samples(tokens: int) -> list[int]:
    return sorted({round(place * (tokens - 1) / max(SAMPLED - 1, 1)) for place in range(SAMPLED)})


def _of_token(q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None = None) -> torch.Tensor:
    """What one token's queries [heads, width] make of their keys [n, width]; a sink may be of more heads."""
    return attended(q[None], keys, scale, None if sink is None else sink[: len(q)])[0]


def _of_v32(layer: Any, errors: Errors) -> Callable[..., Any]:
    def compare(result: Any, q: Any, cache: torch.Tensor, metadata: Any, module: Any) -> None:
        queries = _joined(q)
        kind = "prompts and decodes" if metadata.num_decode_tokens < len(queries) else "decodes"
        for token in _samples(len(queries)):
            positions = layer.impl.topk_indices_buffer[token]
            positions = positions[positions >= 0].long()
            pages = metadata.block_table[metadata.req_id_per_token[token].long()].long()
            slots = pages[positions // cache.shape[1]] * cache.shape[1] + positions % cache.shape[1]
            kv_format = KV_FORMATS[layer.kv_cache_dtype]
            if kv_format == "v32":
                keys = caches.gather(get_kv_format(kv_format), cache.view(torch.uint8), slots)
            else:
                keys = cache[slots // cache.shape[1], slots % cache.shape[1]]
            errors.append((kind, relative(result[0][token], _of_token(queries[token], keys, layer.impl.scale))))

    return _followed(layer.impl.forward_mqa, compare)


def _of_decode(kernel: Callable[..., Any], errors: Errors) -> Callable[..., Any]:
    def compare(result: Any, **given: Any) -> None:
        extra = given["extra_k_cache"] is not None
        pools = [("k_cache", "indices", "topk_length")]
        if extra:
            pools.append(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
        q = given["q"]
        kind = f"decodes, {2 if extra else 1} pools, {given[pools[-1][1]].shape[-1]} of the last"
        for token in _samples(len(q)):
            keys = []
            for cache_name, indices_name, length_name in pools:
                slots = given[indices_name][token, 0, : int(given[length_name][token])].long()
                keys.append(caches.gather(V4, given[cache_name].squeeze(2), slots[slots >= 0]))
            wanted = _of_token(q[token, 0], torch.cat(keys), given["softmax_scale"], given["attn_sink"])
            errors.append((kind, relative(given["out"][token, 0], wanted)))

    return _followed(kernel, compare)


def _of_prefill(kernel: Callable[..., Any], errors: Errors) -> Callable[..., Any]:
    def compare(result: Any, **given: Any) -> None:
        q, kv, indices = given["q"], given["kv"].flatten(0, -2), given["indices"]
        for token in _samples(len(q)):
            chosen = indices[token, 0, : int(given["topk_length"][token])].long()
            wanted = _of_token(q[token], kv[chosen[chosen >= 0]], given["sm_scale"], given["attn_sink"])
            errors.append((f"prompts, {indices.shape[-1]} columns", relative(given["out"][token], wanted)))

    return _followed(kernel, compare)
