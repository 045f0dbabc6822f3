"""The layer of GPU MODE's `amd-mla-decode` contest (2025), full width, both outputs compared at its tolerance.

The published task: one decode step of a DeepSeek-R1 layer at batch 128, bf16, over a pre-filled cache that keeps k_pe
un-rotated; prefill 128, 512, 1024 and 2048; `y` and the whole cache within rtol 2e-2, atol 8e-3. `contest_layer` is
that task's computation step by step, rounding included, in the form its authors corrected: K and V are brought to
[batch, heads, kv_len, dim] by permuting axes (the first published version reshaped, which mixes heads with positions),
and the output projection is drawn at 1 / sqrt(heads x v_head_dim). Batch is 2 here, since the reference up-projects
every cached token; rows of a batch do not touch each other.
"""

import math
from typing import NamedTuple

import pytest
import torch

from mla_suite.models import MLA, MLAConfig, PagedLatentCache

BATCH, MAX_LEN = 2, 2176
DIM, HEADS, Q_LORA, LATENT, ROPE, NOPE, V_DIM = 7168, 128, 1536, 512, 64, 128, 128
CONFIG = MLAConfig(
    hidden_size=DIM,
    num_heads=HEADS,
    q_lora_rank=Q_LORA,
    latent_norms=False,
    rope_interleaved=False,
    cache_rotated=False,
)
RTOL, ATOL = 2e-2, 8e-3


class Weights(NamedTuple):
    q_down: torch.Tensor
    q_up: torch.Tensor
    kv_down: torch.Tensor
    kv_up: torch.Tensor
    out: torch.Tensor


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(97)

    def draw(rows, columns):
        values = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(generator=generator)
        return values.div_(math.sqrt(columns))

    return Weights(
        q_down=draw(Q_LORA, DIM),
        q_up=draw(HEADS * (NOPE + ROPE), Q_LORA),
        kv_down=draw(LATENT + ROPE, DIM),
        kv_up=draw(HEADS * (NOPE + V_DIM), LATENT),
        out=draw(DIM, HEADS * V_DIM),
    )


@pytest.fixture(scope="module")
def layer(weights):
    with torch.device("meta"):
        layer = MLA(CONFIG, layout="bf16", dtype=torch.bfloat16)
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
    """x [batch, 1, dim], cache [batch, MAX_LEN, 576] with `filled` tokens; writes one more and returns y."""
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


@pytest.mark.parametrize("prefill", [128, 512, 1024, 2048])
@torch.no_grad()
def test_one_step_gives_the_contests_y_and_cache(weights, layer, prefill):
    generator = torch.Generator().manual_seed(prefill)
    x = torch.empty(BATCH, 1, DIM, dtype=torch.bfloat16).normal_(generator=generator)
    cache, sequences = PagedLatentCache.contiguous(1, BATCH, MAX_LEN)
    kv_cache = cache.layers[0]
    cache.append(sequences, [prefill] * BATCH)
    kv_cache[:, :prefill].normal_(generator=generator)
    expected_cache = kv_cache.clone()
    expected_y = contest_layer(weights, x, expected_cache, prefill)

    cos, sin = contest_angles(torch.arange(MAX_LEN))
    table = torch.cat((cos[:, : ROPE // 2], sin[:, : ROPE // 2]), dim=-1).float()
    y = layer(x, kv_cache, cache.append(sequences, [1] * BATCH), table)

    torch.testing.assert_close(y, expected_y, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(kv_cache, expected_cache, rtol=RTOL, atol=ATOL)
    assert torch.equal(kv_cache[:, :prefill], expected_cache[:, :prefill])
    assert not kv_cache[:, prefill + 1 :].any()
