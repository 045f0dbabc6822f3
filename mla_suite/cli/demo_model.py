"""The decoder of the demo, small enough for a CPU, and the run that compares it with its textbook forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

import mla_suite
from mla_suite.cli import bar
from mla_suite.errors import usage
from mla_suite.launch import current_arch
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step, cos_sin_table
from mla_suite.models.config import LATENT, ROPE
from mla_suite.models.qkv_down_proj import LatentNorm

PROMPTS = (37, 5, 64, 18)  # tokens per prompt: ragged, below, at and above a page
PAGE_SIZE = 16
VOCABULARY = 1024
# The share of the largest logit that steps may differ by, ten times the usual. Activations of other formats are bf16.
MAX_DIFFERENCE = {"fp16": 0.005, "fp32": 1e-4}
MAX_BF16_DIFFERENCE = 0.03


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
    """Token ids to logits. Weights are random but scaled like a trained model's, so logits stay in a sensible range."""

    cos_sin: torch.Tensor

    def __init__(self, config: MLAConfig, *, kv_format: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size, dtype=dtype)
        blocks = nn.ModuleList(Block(config, kv_format=kv_format, dtype=dtype) for _ in range(config.num_layers))
        self.blocks = cast("Iterable[Block]", blocks)
        self.norm = LatentNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False, dtype=dtype)
        self.register_buffer("cos_sin", cos_sin_table(config), persistent=False)

    def prefill(self, tokens: torch.Tensor, q_lens: list[int], cache: Any, step: Step) -> torch.Tensor:
        """Packed prompts [tokens] of `q_lens` each -> logits fp32 [batch, vocabulary] of every prompt's last token."""
        x = self.embedding(tokens)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = x + block.attention.prefill(block.attention_norm(x), self.cos_sin, layer, step, q_lens=q_lens)
            x = block.feed(x)
        return self.head(self.norm(x[torch.tensor(q_lens).cumsum(0) - 1])).float()

    def decode(self, tokens: torch.Tensor, caches: tuple[torch.Tensor, ...], step: Step) -> torch.Tensor:
        """New tokens [batch, 1] over the caches, which it writes -> logits fp32 [batch, vocabulary]. Traceable."""
        x = self.embedding(tokens)
        for block, kv_cache in zip(self.blocks, caches, strict=True):
            x = x + block.attention.decode(block.attention_norm(x), kv_cache, step, self.cos_sin)
            x = block.feed(x)
        return self.head(self.norm(x[:, 0])).float()

    def unabsorbed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The textbook forward [n] -> logits fp32 [n, vocabulary]: no cache, no absorption, no operator of ours."""
        x = self.embedding(tokens[None])
        positions = torch.arange(tokens.shape[0])[None]
        for block in self.blocks:
            x = x + block.attention.prefill(block.attention_norm(x), self.cos_sin, positions=positions)
            x = block.feed(x)
        return self.head(self.norm(x[0])).float()


def decode(
    tokens: int,
    layers: int,
    kv_format: str,
    seed: int,
    *,
    quiet: bool,
    spread: Callable[[Decoder], Decoder] = lambda whole: whole,
    make_cache: Callable[..., Any] = PagedLatentCache,
    tp_size: int = 1,
) -> dict[str, Any]:
    """Prefill, decode compiled, compare, on torch's default device; -> the report that is printed.

    spread      the decoder -> this rank's part of it
    make_cache  makes the cache, or this rank's part of it
    tp_size     ranks that share the heads
    """
    torch.manual_seed(seed)  # the same weights and prompts on every rank
    r1 = MLAConfig.deepseek_r1()
    config = MLAConfig(
        hidden_size=512,
        num_heads=r1.num_heads,
        q_lora_rank=256,
        num_layers=layers,
        yarn=r1.yarn,
        max_position=max(PROMPTS) + tokens,
    )
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(kv_format, torch.bfloat16)
    with usage():  # a kv_format with rows of another width
        whole = Decoder(config, kv_format=kv_format, dtype=dtype).eval()
    model = spread(whole)
    pages = [-(-(n + tokens) // PAGE_SIZE) for n in PROMPTS]
    cache = make_cache(layers, sum(pages), PAGE_SIZE, kv_format=kv_format, device=torch.get_default_device())
    sequences = [cache.allocate(n + tokens) for n in PROMPTS]
    prompts = [torch.randint(VOCABULARY, (n,)) for n in PROMPTS]

    step_function = torch.compile(model.decode, fullgraph=True)
    logits_by_step = []
    with torch.no_grad(), bar("prefill", tokens, quiet=quiet) as update:
        step = cache.append(sequences, list(PROMPTS), width=max(pages))
        logits = model.prefill(torch.cat(prompts), list(PROMPTS), cache, step)
        chosen = [logits.argmax(-1)]
        seconds = []
        update(description="compile")
        for _ in range(tokens):
            started = time.perf_counter()
            step = cache.append(sequences, [1] * len(sequences), width=max(pages))
            logits_by_step.append(step_function(chosen[-1][:, None], cache.layers, step))
            chosen.append(logits_by_step[-1].argmax(-1))
            chosen[-1].tolist()  # waits for a GPU
            seconds.append(time.perf_counter() - started)
            update(advance=1, **({"description": "decode"} if len(seconds) == 1 else {}))

        update(description="compare")
        whole.float()
        difference = largest = 0.0
        for b, prompt in enumerate(prompts):
            exact = whole.unabsorbed(torch.cat([prompt, torch.stack([c[b] for c in chosen[:-1]])]))[len(prompt) :]
            mine = torch.stack([logits[b] for logits in logits_by_step])
            difference = max(difference, (mine - exact).abs().max().item())
            largest = max(largest, exact.abs().max().item())

    layer = cache.layers[0]
    emulated = None if layer.is_cuda else current_arch(layer)
    bytes_per_token = layer.nbytes // (layer.shape[0] * layer.shape[1])
    return {
        "model": f"{layers} layers, {config.num_heads} heads of {r1.qk_nope_head_dim} + {ROPE}, {kv_format}",
        "prompts": list(PROMPTS),
        "tokens_decoded": tokens * len(PROMPTS),
        "compile_seconds": round(seconds[0], 2),
        "emulated": emulated.name if emulated else None,
        "tokens_per_second": round((tokens - 1) * len(PROMPTS) / max(sum(seconds[1:]), 1e-9), 1),
        "cache_bytes_per_token_and_layer": bytes_per_token,
        "full_attention_bytes_per_token_and_layer": 2 * config.num_heads * (config.qk_head_dim + config.v_head_dim),
        "largest_logit_difference": difference,
        "largest_logit": largest,
        "largest_difference_allowed": MAX_DIFFERENCE.get(kv_format, MAX_BF16_DIFFERENCE) * largest,
        "backends": _backends(config.num_heads // tp_size, layer, step, kv_format, dtype),
    }


def _backends(heads: int, layer: torch.Tensor, step: Step, kv_format: str, dtype: torch.dtype) -> dict[str, str]:
    """The answers of `explain` to the operators of a step."""
    batch = len(PROMPTS)
    q = torch.zeros(batch, 1, heads, LATENT + ROPE, dtype=dtype)
    kv_c, k_pe = torch.zeros(batch, LATENT, dtype=dtype), torch.zeros(batch, ROPE, dtype=dtype)
    answers = (
        mla_suite.explain("decode", q, layer, step.seq_lens, step.block_table, softmax_scale=1.0, kv_format=kv_format),
        mla_suite.explain("append_kv", kv_c, k_pe, layer, step.slot_mapping, kv_format=kv_format),
    )
    return {answer.op: str(answer) for answer in answers}
