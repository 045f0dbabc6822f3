"""Prompts in SGLang on H100 and H200: FlashAttention 3 over each head's keys where that is cheaper, else our decode.

A prompt attends to a cached prefix in one of two ways. Expanded, SGLang reads the prefix's latents in the model's type
and multiplies them out to keys and values of each head. Absorbed, queries of 576 values attend to the latents as they
lie in the cache, by our decode, with 3.4 times the operations for each query and key. SGLang's own backend for
FlashAttention 3 absorbs behind up to 8,192 cached tokens, however many queries there are, and in its graphs always.
Over fp8 caches it rounds expanded queries, keys and values to e4m3 as well, and copies the whole cache for absorbed
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_varlen_func
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import resolve_attn_backend

from mla_suite.integrations import FP8, With, absorbed_prompt, pairs_saved

MOST_PAIRS, MANY_HEADS = 256, 64
"""With so many heads a cached key costs no more pairs of a query and a key than this: SGLang multiplies a prefix out at
once, which takes less time than in vLLM. 256 tokens of 128 heads behind 16,384 in bf16 took an H200 as long in both
ways; 512 of 16 heads took 0.89 of FlashAttention 3's time with absorbed weights.
"""
EAGER_PAIRS = 2**27
"""Such pairs of all heads, beyond those that pay for prefixes, from which a batch stays out of SGLang's graphs of
prompts, whose weights are absorbed.

A choice. By the first tokens of 6 layers, a batch without a graph takes the host 1.1 to 1.8 ms a layer whatever its
length (two machines with an H200, 2026-12-01). Layers that absorb took the GPU 1.1 ms with FlashAttention 3 for 1,024
tokens of 128 heads without a prefix and 0.9 for 512 behind 2,048, but 2.5 for 2,000 without and 1.9 for 1,024 behind
2,048. Fewer heads save less, and launches take the host as long.
"""


def over(dtype: torch.dtype | None, like: torch.Tensor, width: int, heads: int) -> Prompts | None:
    """Returns what takes prompts over a cache of such rows on the device of `like`; None where that is SGLang's."""
    known = dtype in (*FP8, torch.bfloat16, torch.float16)
    pairs = absorbed_prompt(like, width, fp8=dtype in FP8) if known else 0
    pairs = min(pairs, MOST_PAIRS) if heads >= MANY_HEADS else pairs
    return Prompts(pairs) if pairs else None


def register(name: str) -> None:
    """Let SGLang's models ask `forward_method` how a batch attends whose backend has this name."""
    handlers.AttentionBackendRegistry.register(name, forward_method)


def forward_method(attn: Any, forward_batch: Any) -> Any:
    """Returns SGLang's forward method for a layer and a batch.

    With FlashAttention 3 it is that of SGLang's own backend for it, but for the question whether a prefix is expanded:
    SGLang does that from 8,192 tokens on, however many queries there are. A layer with a scale of its cache is never
    expanded, since SGLang then writes rows without it. Else the method is that of SGLang's Triton backend.
    """
    prompts = getattr(resolve_attn_backend(forward_batch), "prompts", None)
    if prompts is None:
        return handlers.handle_attention_triton(attn, forward_batch)
    if attn.attn_mqa.k_scale_float not in (None, 1.0):
        return handlers.AttnForwardMethod.MLA
    expanded = prompts.gain_expanded(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)
    threshold = 0 if expanded else float("inf")  # cached tokens from which SGLang expands a prefix
    return handlers.handle_attention_fa3(With(attn, chunked_prefix_cache_threshold=threshold), forward_batch)


class Prompts:
    """Attention of prompts whose heads have keys of their own, with the lengths of the last batch.

    pairs  of a query and a key for each token of a prefix from which a batch is expanded, as `absorbed_prompt` has it
    """

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self._batch: Any = None
        self._layer = -1
        self._starts: tuple[torch.Tensor, torch.Tensor]
        self._longest: tuple[int, int]

    def gain_expanded(self, new: Sequence[int] | None, cached: Sequence[int] | None, beside: int = 0) -> bool:
        """Whether it is cheaper to expand a batch of sequences with so many new and cached tokens.

        beside  pairs that have to be saved beyond those that pay for the prefixes
        """
        if new is None or cached is None:
            return False  # of no prompt
        return pairs_saved(new, cached, self.pairs) >= beside

    @staticmethod
    def takes(forward_batch: Any) -> bool:
        """Whether SGLang runs one of the forward methods that `forward_method` chooses for expanded prompts."""
        return getattr(forward_batch, "attn_attend_prefix_cache", None) is not None

    def attend(self, call: Any) -> Any:
        """Returns [tokens, heads, head_dim_v]; where SGLang merges it with other results, lse [tokens, heads], too.

        The keys are those of the new tokens, or of all tokens of the sequences, or of a chunk of each prefix.
        """
        layer, batch = call.layer, call.forward_batch
        if batch is not self._batch or layer.layer_id < self._layer:
            self._measure(batch)
        self._batch, self._layer = batch, layer.layer_id
        (starts_q, starts_k), (longest_q, longest_k) = self._starts, self._longest
        of_prefix = bool(batch.attn_attend_prefix_cache)
        if of_prefix:
            starts_k = batch.prefix_chunk_cu_seq_lens[batch.prefix_chunk_idx]
            longest_k = batch.prefix_chunk_max_seq_lens[batch.prefix_chunk_idx]
        elif not batch.mha_one_shot:
            starts_k, longest_k = starts_q, longest_q
        found = flash_attn_varlen_func(
            q=call.q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k=call.k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v=call.v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
            softmax_scale=layer.scaling,
            causal=not of_prefix,
            return_softmax_lse=bool(batch.mha_return_lse),
        )
        if not batch.mha_return_lse:
            return found
        out, lse, *_ = found
        return out, lse.T.contiguous()

    def _measure(self, batch: Any) -> None:
        new = [int(length) for length in batch.extend_seq_lens_cpu]
        of_both = [q_len + int(prefix) for q_len, prefix in zip(new, batch.extend_prefix_lens_cpu, strict=True)]
        lengths = torch.stack((batch.extend_seq_lens, batch.seq_lens)).cumsum(1)
        starts_q, starts_k = torch.nn.functional.pad(lengths, (1, 0)).int()
        self._starts, self._longest = (starts_q, starts_k), (max(new), max(of_both))
