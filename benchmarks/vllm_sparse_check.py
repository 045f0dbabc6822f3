"""Samples of the sparse attention of a vLLM engine, beside their definition in fp32 over the engine's own caches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from vllm_model import attention_layers, require_small

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

SAMPLED = 6  # tokens of a call
KV_FORMATS = {"auto": "bf16", "bfloat16": "bf16", "fp8_ds_mla": "v32"}
V4 = get_kv_format("dsv4")
Errors = list[tuple[str, float]]  # of each sample: of which call, and its relative error


@contextlib.contextmanager
def watch(llm: Any, model: str) -> Iterator[Errors]:
    """Compare calls of eager steps until the block ends; AssertionError then, unless every error is small."""
    errors: Errors = []
    with contextlib.ExitStack() as stack:
        if model == "v32":
            for layer in llm.collective_rpc(attention_layers)[0]:
                stack.enter_context(mock.patch.object(layer.impl, "forward_mqa", _of_v32(layer, errors)))
        else:
            kernels = import_module("vllm.models.deepseek_v4.nvidia.flashmla")
            for name, wrap in (("flash_mla_with_kvcache", _of_decode), ("flash_mla_sparse_fwd", _of_prefill)):
                stack.enter_context(mock.patch.object(kernels, name, wrap(getattr(kernels, name), errors)))
        yield errors
    require_small([error for _, error in errors])


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _samples(tokens: int) -> list[int]:
    return sorted({round(place * (tokens - 1) / max(SAMPLED - 1, 1)) for place in range(SAMPLED)})


def _attended(q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None = None) -> torch.Tensor:
    """What one token's queries [heads, width] make of their keys [n, width], in fp32."""
    scores = q.float() @ keys.T * scale
    if sink is not None:
        scores = torch.cat((scores, sink[: len(q), None].float()), 1)
    weights = scores.softmax(1)[:, : len(keys)]
    return weights @ keys[:, :512]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def _of_v32(layer: Any, errors: Errors) -> Callable[..., Any]:
    forward = layer.impl.forward_mqa

    def compared(q: Any, cache: torch.Tensor, metadata: Any, module: Any) -> Any:
        out, lse = forward(q, cache, metadata, module)
        if _capturing():
            return out, lse
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
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
                keys = cache[slots // cache.shape[1], slots % cache.shape[1]].float()
            expected = _attended(queries[token], keys, layer.impl.scale)
            errors.append((kind, _relative(out[token], expected)))
        return out, lse

    return compared


def _of_decode(kernel: Callable[..., Any], errors: Errors) -> Callable[..., Any]:
    def compared(**given: Any) -> Any:
        result = kernel(**given)
        if _capturing():
            return result
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
            wanted = _attended(q[token, 0], torch.cat(keys), given["softmax_scale"], given["attn_sink"])
            errors.append((kind, _relative(given["out"][token, 0], wanted)))
        return result

    return compared


def _of_prefill(kernel: Callable[..., Any], errors: Errors) -> Callable[..., Any]:
    def compared(**given: Any) -> Any:
        result = kernel(**given)
        q, kv, indices = given["q"], given["kv"].flatten(0, -2), given["indices"]
        for token in _samples(len(q)):
            chosen = indices[token, 0, : int(given["topk_length"][token])].long()
            wanted = _attended(q[token], kv[chosen[chosen >= 0]].float(), given["sm_scale"], given["attn_sink"])
            errors.append((f"prompts, {indices.shape[-1]} columns", _relative(given["out"][token], wanted)))
        return result

    return compared
