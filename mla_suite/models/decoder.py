"""A whole DeepSeek-style decoder around `MLA`, small enough for a CPU: what the demo and the end-to-end tests run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from mla_suite.models.cache import PagedLatentCache, Step
from mla_suite.models.config import MLAConfig
from mla_suite.models.mla import MLA, LatentNorm
from mla_suite.models.rope import cos_sin_table


class Block(nn.Module):
    """Attention and a SwiGLU feed-forward, each behind an RMS norm and added to the residual."""

    def __init__(self, config: MLAConfig, *, kv_format: str, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, 2 * config.hidden_size
        self.attention_norm = LatentNorm(hidden, config.norm_eps, dtype=dtype)
        self.attention = MLA(config, kv_format=kv_format, dtype=dtype)
        self.feed_norm = LatentNorm(hidden, config.norm_eps, dtype=dtype)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids to logits. Weights are random but scaled like a trained model's, so logits stay in a sensible range.

    vocabulary  number of token ids
    kv_format      how the caches store tokens; `caches` in the calls below are the tensors of a `PagedLatentCache`
    """

    cos_sin: torch.Tensor

    def __init__(
        self, config: MLAConfig, vocabulary: int, *, kv_format: str = "bf16", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocabulary, config.hidden_size, dtype=dtype)
        blocks = nn.ModuleList(Block(config, kv_format=kv_format, dtype=dtype) for _ in range(config.num_layers))
        self.blocks = cast("Iterable[Block]", blocks)
        self.norm = LatentNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.head = nn.Linear(config.hidden_size, vocabulary, bias=False, dtype=dtype)
        self.register_buffer("cos_sin", cos_sin_table(config), persistent=False)

    def prefill(self, tokens: torch.Tensor, q_lens: list[int], cache: PagedLatentCache, step: Step) -> torch.Tensor:
        """Packed prompts [tokens] of `q_lens` each -> logits fp32 [batch, vocabulary] of every prompt's last token."""
        x = self.embedding(tokens)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = x + block.attention.prefill(block.attention_norm(x), self.cos_sin, layer, step, q_lens=q_lens)
            x = block.feed(x)
        last = torch.tensor(q_lens).cumsum(0) - 1
        return self.head(self.norm(x[last])).float()

    def decode(
        self, tokens: torch.Tensor, caches: tuple[torch.Tensor, ...], step: Step, plan: torch.Tensor | None = None
    ) -> torch.Tensor:
        """New tokens [batch, q_len] over the caches, which it writes -> logits fp32 [batch, q_len, vocabulary].

        Traceable with fullgraph. One `plan` serves every layer of a step.
        """
        x = self.embedding(tokens)
        for block, kv_cache in zip(self.blocks, caches, strict=True):
            x = x + block.attention.decode(block.attention_norm(x), kv_cache, step, self.cos_sin, plan=plan)
            x = block.feed(x)
        return self.head(self.norm(x)).float()

    def unabsorbed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The textbook forward: no cache, no absorption, no operator of this package. [batch, n] -> fp32 logits.

        It is the reference that `prefill` and `decode` are compared with.
        """
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        for block in self.blocks:
            x = x + block.attention.prefill(block.attention_norm(x), self.cos_sin, positions=positions)
            x = block.feed(x)
        return self.head(self.norm(x)).float()
