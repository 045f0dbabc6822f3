"""One attention layer on one rank of a tensor-parallel and context-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from mla_suite.distributed.context import cp_decode
from mla_suite.distributed.parallel import Parallel, check_agreement
from mla_suite.models.absorb import absorbed, head_values
from mla_suite.models.cache import Step, check_sequences
from mla_suite.models.config import MLAConfig
from mla_suite.models.mla import MLA

CP_OPTIONS = ("kv_descale", "max_seqlen_kv", "plan", "split_size")  # of `ParallelMLA.decode` with context parallelism


class ParallelMLA(MLA):
    """`MLA` spread over the ranks of a `Parallel`: it takes and returns the full hidden states on every rank.

    Each rank has the weights of heads / ranks heads. A decode step gathers the queries of a context-parallel group,
    attends to the rank's keys, exchanges partial results so that each rank gets its own heads back complete, and sums
    o_proj's shares over all ranks. Every rank gets the whole layer's result.

    config      of the whole layer, with all heads
    parallel    the process groups
    interleave  keys in a row that lie on one rank of the context-parallel group

    ValueError on every rank where the ranks were given different ones. Inference only, without a cache too: backward()
    raises, since a rank has the gradients of its own heads alone.
    """

    def __init__(self, config: MLAConfig, parallel: Parallel, *, interleave: int = 1, **options: Any) -> None:
        if parallel.world > 1:  # first of all: a rank that refuses its own arguments would leave the others waiting
            given = {"interleave": interleave, **asdict(config), **options, "device": None}
            check_agreement(given, parallel.all_group)
        if parallel.cp_size > 1 and not config.cache_rotated:
            raise ValueError(
                "ParallelMLA: an un-rotated cache with context parallelism; a rank's local positions are not the "
                "sequence's: set cache_rotated=True"
            )
        super().__init__(config.for_rank(parallel.world), **options)
        self.parallel = parallel
        self.shard = parallel.shard(interleave)

    def load_full_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies a full layer's tensors, sliced to this rank's heads."""
        self.load_weights(weights, tp_rank=self.parallel.rank, tp_size=self.parallel.world)

    def decode(
        self, x: torch.Tensor, kv_cache: torch.Tensor, step: Step, cos_sin: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """As `MLA.decode`, over this rank's cache and the step of `ContextParallelCache`; the same x on every rank.

        options  kv_descale, max_seqlen_kv (of the whole sequence), split_size, and plan, which is made from the rank's
                 lengths; the rest of MLA.decode's without context parallelism
        """
        parallel = self.parallel
        if parallel.cp_size == 1:
            return parallel.sum_over_all(super().decode(x, kv_cache, step, cos_sin, **options))
        if others := sorted(name for name in options if name not in CP_OPTIONS):
            raise TypeError(
                f"ParallelMLA.decode: {', '.join(others)} with context parallelism; it takes {', '.join(CP_OPTIONS)}"
            )
        check_sequences(x, step)
        w_uk, w_uv = self._up_projections()
        q_nope, q_pe, kv_c, k_pe = self._projected(x)
        self._append(kv_c, k_pe, kv_cache, step, cos_sin, options.get("kv_descale"))
        q = absorbed(q_nope, q_pe, w_uk, cos_sin, step.positions, interleaved=self.config.rope_interleaved)
        out, _ = cp_decode(
            parallel.gather_heads(q),
            kv_cache,
            step.seq_lens,
            step.block_table,
            shard=self.shard,
            group=parallel.cp_group,
            softmax_scale=self.config.softmax_scale,
            head_dim_v=self.config.kv_lora_rank,
            kv_format=self.kv_format,
            **options,
        )
        return parallel.sum_over_all(self.o_proj(head_values(out, w_uv).flatten(-2)))

    def prefill(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor | None = None,
        step: Step | None = None,
        *,
        q_lens: Sequence[int] | None = None,
        prefix: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """As `MLA.prefill`: every rank attends among the new tokens with its own heads and stores the keys it owns.

        ValueError for a cached prefix with context parallelism: write those tokens with `decode`.
        """
        if prefix and self.parallel.cp_size > 1:
            raise ValueError(
                "ParallelMLA.prefill: prefix=True with context parallelism; the prefix is spread over the ranks: pass "
                "the new tokens through decode"
            )
        out = super().prefill(x, cos_sin, kv_cache, step, q_lens=q_lens, prefix=prefix, **options)
        return self.parallel.sum_over_all(out)
