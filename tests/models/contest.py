"""GPU MODE's `amd-mla-decode` contest (2025): its layer step by step, rounding included, and the same layer as `MLA`.

The published task: one decode step of a DeepSeek-R1 layer at batch 128, bf16, over a pre-filled cache that keeps k_pe
un-rotated; prefill 128, 512, 1024 and 2048; `y` and the whole cache within rtol 2e-2, atol 8e-3. `contest_layer` is
that task's computation in the form its authors corrected: K and V are brought to [batch, heads, kv_len, dim] by
permuting axes (the first published version reshaped, which mixes heads with positions), and the output projection is
drawn at 1 / sqrt(heads x v_head_dim).
"""

import math
from typing import NamedTuple

import torch

from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step

DIM, HEADS, Q_LORA, LATENT, ROPE, NOPE, V_DIM = 7168, 128, 1536, 512, 64, 128, 128
RTOL, ATOL = 2e-2, 8e-3


class Weights(NamedTuple):
    q_down: torch.Tensor
    q_up: torch.Tensor
    kv_down: torch.Tensor
    kv_up: torch.Tensor
    out: torch.Tensor


def drawn_weights(dim=DIM):
    generator = torch.Generator().manual_seed(97)

    def draw(rows, columns):
        values = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(generator=generator)
        return values.div_(math.sqrt(columns))

    return Weights(
        q_down=draw(Q_LORA, dim),
        q_up=draw(HEADS * (NOPE + ROPE), Q_LORA),
        kv_down=draw(LATENT + ROPE, dim),
        kv_up=draw(HEADS * (NOPE + V_DIM), LATENT),
        out=draw(dim, HEADS * V_DIM),
    )


def our_layer(weights):
    config = MLAConfig(
        hidden_size=weights.out.shape[0],
        num_heads=HEADS,
        q_lora_rank=Q_LORA,
        latent_norms=False,
        rope_interleaved=False,
        cache_rotated=False,
    )
    with torch.device("meta"):
        layer = MLA(config, kv_format="bf16", dtype=torch.bfloat16)
    named = {
        "q_a_proj.weight": weights.q_down,
        "q_b_proj.weight": weights.q_up,
        "kv_a_proj_with_mqa.weight": weights.kv_down,
        "kv_b_proj.weight": weights.kv_up,
        "o_proj.weight": weights.out,
    }
    layer.load_state_dict(named, assign=True)
    return layer


def contest_angles(positions):
    """cos and sin [positions, ROPE] in bf16; theta and the angles are bf16 too, so far positions are coarse."""
    theta = 10000 ** (-torch.arange(0, ROPE // 2, dtype=torch.bfloat16) / (ROPE // 2))
    angles = positions[:, None] * theta
    assert angles.dtype == torch.bfloat16
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def contest_rope(x, positions):
    """x [..., positions, ROPE] rotated in bf16, halves paired."""
    cos, sin = contest_angles(positions)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def contest_layer(weights, x, cache, filled):
    """x [batch, 1, dim], cache [batch, max_len, 576] with `filled` tokens; writes one more and returns y."""
    batch = x.shape[0]
    q_lora = x @ weights.q_down.T
    cache[:, filled] = (x @ weights.kv_down.T)[:, 0]
    kv_len = filled + 1
    seen = cache[:, :kv_len]

    q = (q_lora @ weights.q_up.T).view(batch, 1, HEADS, NOPE + ROPE).permute(0, 2, 1, 3)
    q_nope, q_rope = q.split([NOPE, ROPE], dim=-1)
    q = torch.cat((q_nope, contest_rope(q_rope, torch.tensor([filled]))), dim=-1)

    up = (seen[..., :LATENT] @ weights.kv_up.T).view(batch, kv_len, HEADS, NOPE + V_DIM).permute(0, 2, 1, 3)
    k_nope, v = up.split([NOPE, V_DIM], dim=-1)
    k_rope = contest_rope(seen[..., LATENT:], torch.arange(kv_len))[:, None].expand(-1, HEADS, -1, -1)
    k = torch.cat((k_nope, k_rope), dim=-1)

    scores = q @ k.transpose(-1, -2) / math.sqrt(NOPE + ROPE)
    attention = scores.softmax(dim=-1).to(torch.bfloat16)
    return (attention @ v).permute(0, 2, 1, 3).reshape(batch, 1, -1) @ weights.out.T


class Problem(NamedTuple):
    """One step: x [batch, 1, dim], the cache before it, what `MLA` takes beside them, and the contest's answers."""

    x: torch.Tensor
    kv_cache: torch.Tensor
    step: Step
    cos_sin: torch.Tensor
    y: torch.Tensor
    written: torch.Tensor


def problem(weights, batch, prefill, max_len):
    generator = torch.Generator().manual_seed(prefill)
    x = torch.empty(batch, 1, weights.out.shape[0], dtype=torch.bfloat16).normal_(generator=generator)
    cache, sequences = PagedLatentCache.contiguous(1, batch, max_len)
    kv_cache = cache.layers[0]
    cache.append(sequences, [prefill] * batch)
    kv_cache[:, :prefill].normal_(generator=generator)
    written = kv_cache.clone()
    y = contest_layer(weights, x, written, prefill)
    cos, sin = contest_angles(torch.arange(max_len))
    table = torch.cat((cos[:, : ROPE // 2], sin[:, : ROPE // 2]), dim=-1).float()
    return Problem(x, kv_cache, cache.append(sequences, [1] * batch), table, y, written)


def compare(y, kv_cache, expected, prefill):
    """Both outputs within the task's tolerance; nothing but the new token's row may change."""
    torch.testing.assert_close(y, expected.y, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(kv_cache, expected.written, rtol=RTOL, atol=ATOL)
    assert torch.equal(kv_cache[:, :prefill], expected.written[:, :prefill])
    assert not kv_cache[:, prefill + 1 :].any()
