"""GPU MODE's `amd-mla-decode` contest (2025): its layer step by step, rounding included, and the same layer as `MLA`.

The task: one decode step of a DeepSeek-R1 layer at batch 128, bf16, over a pre-filled cache of 8192 rows per sequence
that keeps k_pe un-rotated; timed at prefill 512, 2048, 4096 and 6144; `y` and the whole cache within rtol 2e-2, atol
1e-3. `published_layer` is what its first text computes, which is not attention. `contest_layer` is the form that its
authors corrected: K and V are brought to [batch, heads, kv_len, dim] by permuting axes, and a key is rotated by its own
position; the tolerance became atol 8e-3.
"""

import dataclasses
import math
from typing import NamedTuple

import torch

from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step, cos_sin_table

DIM, HEADS, Q_LORA, LATENT, ROPE, NOPE, V_DIM = 7168, 128, 1536, 512, 64, 128, 128
RTOL, ATOL = 2e-2, 8e-3
PUBLISHED_ATOL = 1e-3
ROOM = 8192  # rows of a sequence in the cache
GROUP = 16  # heads that are up-projected at a time
EXACT_OUTPUTS = 1024  # values of y that are also computed in fp64


class Weights(NamedTuple):
    q_down: torch.Tensor
    q_up: torch.Tensor
    kv_down: torch.Tensor
    kv_up: torch.Tensor
    out: torch.Tensor


def drawn_weights(dim=DIM):
    generator = torch.Generator().manual_seed(97)

    def draw(rows, columns, by=0):
        values = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(generator=generator)
        return values.div_(math.sqrt(by or columns))

    return Weights(
        q_down=draw(Q_LORA, dim),
        q_up=draw(HEADS * (NOPE + ROPE), Q_LORA),
        kv_down=draw(LATENT + ROPE, dim),
        kv_up=draw(HEADS * (NOPE + V_DIM), LATENT),
        out=draw(dim, HEADS * V_DIM, by=DIM),  # not by its columns: so the task has it
    )


def our_layer(weights):
    config = dataclasses.replace(MLAConfig.gpu_mode_2025(), hidden_size=weights.out.shape[0])
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


def product(a, b):
    """A product of bf16 matrices with fp32 sums: what a bf16 GEMM gives, and faster than one on a CPU without it."""
    return (a.float() @ b.float()).bfloat16()


def begin(weights, x, cache, filled):
    """Writes the new token; -> queries [batch, heads, 1, 192] and what is cached: latents, and un-rotated k_pe."""
    cache[:, filled] = (x @ weights.kv_down.T)[:, 0]
    q = (x @ weights.q_down.T @ weights.q_up.T).view(x.shape[0], 1, HEADS, NOPE + ROPE).transpose(1, 2)
    q_nope, q_rope = q.split([NOPE, ROPE], dim=-1)
    q = torch.cat((q_nope, contest_rope(q_rope, torch.tensor([filled]))), dim=-1)
    return q, *cache[:, : filled + 1].split([LATENT, ROPE], dim=-1)


def attend(q, k, v):
    """bf16 softmax weights, each product rounded."""
    scores = product(q, k.transpose(-1, -2)) / math.sqrt(NOPE + ROPE)
    return product(scores.softmax(dim=-1).bfloat16(), v)


def contest_layer(weights, x, cache, filled):
    """x [batch, 1, dim], cache [batch, max_len, 576] with `filled` tokens; writes one more and returns y."""
    q, latents, k_rope = begin(weights, x, cache, filled)
    k_rope = contest_rope(k_rope, torch.arange(filled + 1))[:, None].expand(-1, GROUP, -1, -1)
    found = []
    for queries, up in zip(
        q.split(GROUP, 1), weights.kv_up.view(HEADS, NOPE + V_DIM, LATENT).split(GROUP), strict=True
    ):
        k_nope, v = product(latents[:, None], up.transpose(1, 2)).split([NOPE, V_DIM], dim=-1)
        found.append(attend(queries, torch.cat((k_nope, k_rope), dim=-1), v))
    return torch.cat(found, dim=1).transpose(1, 2).reshape(x.shape[0], 1, -1) @ weights.out.T


def published_layer(weights, x, cache, filled):
    """The task's first text. A key's position is taken from an axis of length 1, so that every key is rotated by
    position 0, and [batch, kv_len, heads, dim] is reshaped to [batch, heads, kv_len, dim], which mixes heads with
    positions."""
    q, latents, k_rope = begin(weights, x, cache, filled)
    batch, kv_len = latents.shape[:2]
    up = product(latents, weights.kv_up.T).view(batch, kv_len, HEADS, NOPE + V_DIM)
    k_nope, v = up.split([NOPE, V_DIM], dim=-1)
    k_rope = contest_rope(k_rope[:, :, None], torch.tensor([0])).expand(-1, -1, HEADS, -1)
    k = torch.cat((k_nope, k_rope), dim=-1).reshape(batch, HEADS, kv_len, NOPE + ROPE)
    return attend(q, k, v.reshape(batch, HEADS, kv_len, V_DIM)).reshape(batch, 1, -1) @ weights.out.T


def exact_layer(weights, x, cache, filled):
    """The first EXACT_OUTPUTS values of y in fp64, absorbed, with the task's bf16 table; `cache` is left as it is."""
    x, cos_sin = x.double(), cos_sin_table(MLAConfig.gpu_mode_2025(), filled + 1, dtype=torch.bfloat16).double()

    def turned(values, table):
        (low, high), (cos, sin) = values.chunk(2, dim=-1), table.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    keys = torch.cat((cache[:, :filled].double(), x @ weights.kv_down.double().T), dim=1)
    latents, k_rope = keys.split([LATENT, ROPE], dim=-1)
    q = (x @ weights.q_down.double().T @ weights.q_up.double().T).view(-1, HEADS, NOPE + ROPE)
    up_k, up_v = weights.kv_up.double().view(HEADS, NOPE + V_DIM, LATENT).split([NOPE, V_DIM], dim=1)
    scores = torch.einsum("bhn,hnl->bhl", q[..., :NOPE], up_k) @ latents.transpose(1, 2)
    scores += turned(q[..., NOPE:], cos_sin[filled]) @ turned(k_rope, cos_sin).transpose(1, 2)
    heads = torch.einsum("bhl,hvl->bhv", (scores / math.sqrt(NOPE + ROPE)).softmax(dim=-1) @ latents, up_v)
    return heads.flatten(1)[:, None] @ weights.out[:EXACT_OUTPUTS].double().T


def times_tolerance(y, expected, atol):
    """How far the worst value is from where rtol and atol would have it: above 1 it is out."""
    y, expected = y[..., : expected.shape[-1]].double(), expected.double()
    return float(((y - expected).abs() / (atol + RTOL * expected.abs())).max())


class Problem(NamedTuple):
    """One step: x [batch, 1, dim], the cache before it, what `MLA` takes beside them, and the contest's answers."""

    x: torch.Tensor
    kv_cache: torch.Tensor
    step: Step
    cos_sin: torch.Tensor
    y: torch.Tensor
    written: torch.Tensor


def problem(weights, batch, prefill, layer=contest_layer):
    generator = torch.Generator().manual_seed(prefill)
    x = torch.empty(batch, 1, weights.out.shape[0], dtype=torch.bfloat16).normal_(generator=generator)
    cache, sequences = PagedLatentCache.contiguous(1, batch, ROOM)
    kv_cache = cache.layers[0]
    cache.append(sequences, [prefill] * batch)
    kv_cache[:, :prefill].normal_(generator=generator)
    written = kv_cache.clone()
    y = layer(weights, x, written, prefill)
    table = cos_sin_table(MLAConfig.gpu_mode_2025(), dtype=torch.bfloat16)
    return Problem(x, kv_cache, cache.append(sequences, [1] * batch), table, y, written)


def compare(y, kv_cache, expected, prefill):
    """Both outputs within the corrected task's tolerance; nothing but the new token's row may change."""
    torch.testing.assert_close(y, expected.y, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(kv_cache, expected.written, rtol=RTOL, atol=ATOL)
    assert torch.equal(kv_cache[:, :prefill], expected.written[:, :prefill])
    assert not kv_cache[:, prefill + 1 :].any()
