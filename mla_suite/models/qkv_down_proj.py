"""Hidden states to latents, k_pe and the input of the queries: both down-projections as one product, then their norms.

In torch that is the product, the sum of the parts that cuBLAS splits K into, and both norms. On CUDA GPUs it is an
operator, `mla_suite_layers::latents`: the product leaves its parts apart, in fp32, and one kernel adds and norms them.
"""

from __future__ import annotations

from operator import is_

import torch
from torch import nn
from torch.nn import functional

from mla_suite.models.absorb import not_plain
from mla_suite.models.operators import TAGS, have_kernels, library, on_its_device

PARTS = 2  # splits of K; with 4 a step took 1.5 us longer
MAX_TOKENS = 256  # above this, writing and reading fp32 partial results costs more than the split of K saves

library.define(
    "latents(Tensor x, Tensor weight, Tensor q_weight, Tensor kv_weight, float q_eps, float kv_eps)"
    " -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Parameters = tuple[torch.Tensor | None, ...]


class LatentNorm(nn.Module):
    """x / rms(x) in fp32, rounded to x's dtype, then times weight: the rounding order of DeepSeek's own code."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def joined(first: nn.Linear, second: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight, and one bias where either has one, of which those of both projections become views."""
    both = first, second
    sizes = [each.out_features for each in both]
    weight = torch.cat([each.weight.data for each in both])
    for each, part in zip(both, weight.split(sizes), strict=True):
        each.weight.data = part
    if first.bias is None and second.bias is None:
        return weight, None
    bias = torch.cat([weight.new_zeros(each.out_features) if each.bias is None else each.bias.data for each in both])
    for each, part in zip(both, bias.split(sizes), strict=True):
        if each.bias is not None:
            each.bias.data = part
    return weight, bias


def held(first: nn.Linear, second: nn.Linear) -> Parameters:
    """Weight and bias, or None, of the first and of the second: the modules' own or those of a functional call."""
    return *first._parameters.values(), *second._parameters.values()


def are_views(now: Parameters, then: Parameters, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the parameters are still those that were joined and still views of the weight and bias made then."""
    same = all(map(is_, now, then))
    if torch.compiler.is_dynamo_compiling():
        return same  # which storage they have is not traced
    if not same and not torch.compiler.is_exporting():  # non-strict export has stand-ins, which share as they do
        return False
    return _share(weight, now[::2]) and (bias is None or _share(bias, now[1::2]))  # weights and biases alternate


def _share(whole: torch.Tensor, parts: Parameters) -> bool:
    storage = whole.untyped_storage()
    return all(part is None or part.untyped_storage() is storage for part in parts)


def equals_both(
    x: torch.Tensor,
    first: nn.Linear,
    second: nn.Linear,
    then: Parameters,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> bool:
    """Whether one product with the joined weight is all that calling both modules would be.

    They are plain, with the parameters that were joined, and record no gradients, which would be theirs.
    """
    if not_plain(first) is not None or not_plain(second) is not None:
        return False
    now = held(first, second)
    if torch.is_grad_enabled() and (x.requires_grad or any(own is not None and own.requires_grad for own in now)):
        return False
    return are_views(now, then, weight, bias)


def latents(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm: nn.Module | None,
    kv_norm: nn.Module,
    sizes: list[int],
) -> Three:
    """x [..., hidden] times weight [sum(sizes), hidden], plus bias, split into q, kv_c and k_pe; q and kv_c normed.

    Without q_norm q is left as it is.
    """
    if bias is None and isinstance(q_norm, LatentNorm) and isinstance(kv_norm, LatentNorm):
        operands = x, weight, q_norm.weight, kv_norm.weight
        if have_kernels(*operands):
            q, kv_c, k_pe = torch.ops.mla_suite_layers.latents(*operands, q_norm.eps, kv_norm.eps)
            return q, kv_c, k_pe
    q, kv_c, k_pe = functional.linear(x, weight, bias).split(sizes, dim=-1)
    return q if q_norm is None else q_norm(q), kv_norm(kv_c), k_pe


def _latents(
    x: torch.Tensor, weight: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, q_eps: float, kv_eps: float
) -> Three:
    made = _empty_latents(x, weight, q_weight, kv_weight)
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0]:
        _add_and_norm(_parts(rows, weight), q_weight, kv_weight, q_eps, kv_eps, made)
    return made


def _parts(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[parts, tokens, outputs] of rows [tokens, hidden] times weight [outputs, hidden], each over a part of hidden."""
    (tokens, hidden), outputs = rows.shape, weight.shape[0]
    if tokens > MAX_TOKENS or hidden % PARTS or not weight.is_contiguous():
        return functional.linear(rows, weight)[None]
    left = rows.view(tokens, PARTS, -1).transpose(0, 1)
    return torch.bmm(left, weight.view(outputs, PARTS, -1).permute(1, 2, 0), out_dtype=torch.float32)


def _add_and_norm(
    parts: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, q_eps: float, kv_eps: float, made: Three
) -> None:
    from mla_suite.models import qkv_down_proj_triton  # triton comes with torch's CUDA builds alone

    q, kv_c, k_pe = made
    qkv_down_proj_triton.latents_kernel[(parts.shape[1], 2)](
        parts,
        q_weight,
        kv_weight,
        q,
        kv_c,
        k_pe,
        *parts.stride()[:2],
        q_eps,
        kv_eps,
        PARTS=parts.shape[0],
        QUERY=q.shape[-1],
        LATENT=kv_c.shape[-1],
        ROPE=k_pe.shape[-1],
        num_warps=4,
    )


def _empty_latents(
    x: torch.Tensor, weight: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, *_: float
) -> Three:
    query, latent = q_weight.shape[0], kv_weight.shape[0]
    q, kv_c, k_pe = (x.new_empty(*x.shape[:-1], size) for size in (query, latent, weight.shape[0] - query - latent))
    return q, kv_c, k_pe


library.impl("latents", on_its_device(_latents), "CUDA")
torch.library.register_fake("mla_suite_layers::latents", _empty_latents, lib=library)
