"""`rocm_sparse_attn_decode` of vLLM's ROCm backend for DeepSeek V4, over our sparse decode.

    import vllm.models.deepseek_v4.amd.rocm as model_code
    from mla_suite.integrations import vllm_rocm

    model_code.rocm_sparse_attn_decode = vllm_rocm.rocm_sparse_attn_decode

The signature is that of vLLM's `vllm.v1.attention.ops.rocm_aiter_mla_sparse`, 0.32's and 0.33's, for V4 and V4.1; the
backend MLA_SUITE_DSV4 makes that assignment for both (`mla_suite.integrations.vllm_v4`). Rows come back as attention
leaves them: the caller turns them by the inverse rope, as it does after AITER's kernel.
"""

from __future__ import annotations

import torch

from mla_suite.errors import CallError
from mla_suite.integrations import check_kinds, refuse, restate
from mla_suite.ops.plan.metadata import OPEN

NAME = "rocm_sparse_attn_decode"
HEAD_DIM, NOPE, ROPE = 512, 448, 64
OCP, FNUZ = "dsv4", "dsv4_fnuz"
POOLS = "swa", "topk"
_WORDS = {
    "kv_caches[0]": "swa_k_cache",
    "kv_caches[1]": "kv_cache",
    "softmax_scale": "scale",
    "kv_format": "format",
    "out": "output",
}
_WORDS |= {f"indices[{number}]": f"{pool}_indices" for number, pool in enumerate(POOLS)}
_WORDS |= {f"indptrs[{number}]": f"{pool}_ragged_indptr" for number, pool in enumerate(POOLS)}
_WORDS |= {f"topk_lengths[{number}]": f"{pool}_lens" for number, pool in enumerate(POOLS)}
"""Arguments of sparse_decode -> those of `rocm_sparse_attn_decode`."""


def rocm_sparse_attn_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    swa_only: bool,
    topk_indices: torch.Tensor | None,
    topk_lens: torch.Tensor | None,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor | None,
    swa_ragged_indices: torch.Tensor | None,
    swa_ragged_indptr: torch.Tensor | None,
    topk_ragged_indices: torch.Tensor | None,
    topk_ragged_indptr: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    scale: float,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    output: torch.Tensor | None,
    extra_cache_nan_free: bool = False,
    adaptive_splits: bool = False,
    inv_rope_positions: torch.Tensor | None = None,
    inv_rope_cos_sin_cache: torch.Tensor | None = None,
    output_mxfp8: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    enable_batch_invariant: bool = False,
) -> int:
    """Attend from each decode token to its window and, unless swa_only, to its selected compressed keys.

    q            [tokens, heads, 512]; attn_sink fp32 [at least heads]; output of q's shape and dtype, written
    output_mxfp8 in the place of output: e4m3 values [tokens, heads x 512] and E8M0 scales [tokens, heads x 16], which
                 vLLM's own kernel writes, after the inverse rope at inv_rope_positions
    swa_k_cache  uint8 [pages, page, 584], the window's records; kv_cache the compressed ones, of another page size
    *_indices    int32 [tokens, topk] or [tokens, 1, topk] slots, *_lens int32 [tokens]: that many of them count; used
                 where the ragged pair, int32 [n] and [tokens + 1], is None
    The window's records are FNUZ where vLLM's platform says so, the compressed ones are always OCP.
    extra_cache_nan_free and adaptive_splits change no result and are not used. enable_batch_invariant is ours alone:
    keys are then not split, so a token's bits do not depend on its batch.

    Returns how many leading rows are turned by the inverse rope: with output none, so the caller turns all of them.
    """
    if (output is None) == (output_mxfp8 is None):
        given = "neither output nor output_mxfp8 is given" if output is None else "both are given"
        refuse(NAME, given, "pass output, or output_mxfp8 with None for output")
    if output_mxfp8 is not None and (inv_rope_positions is None or inv_rope_cos_sin_cache is None):
        possible = "results are rotated before they are quantised: pass inv_rope_positions and inv_rope_cos_sin_cache"
        refuse(NAME, "output_mxfp8 is given without what turns the results", possible)
    if (head_dim, nope_head_dim, rope_head_dim) != (HEAD_DIM, NOPE, ROPE):
        given = f"head_dim {head_dim} of nope {nope_head_dim} and rope {rope_head_dim}"
        refuse(NAME, given, f"records hold {NOPE} + {ROPE} values")
    optional = dict(kv_cache=kv_cache, topk_indices=topk_indices, topk_lens=topk_lens, swa_lens=swa_lens)
    optional |= dict(swa_indices=swa_indices, swa_ragged_indices=swa_ragged_indices, attn_sink=attn_sink)
    optional |= dict(swa_ragged_indptr=swa_ragged_indptr, topk_ragged_indices=topk_ragged_indices)
    optional |= dict(topk_ragged_indptr=topk_ragged_indptr)
    optional |= dict(output=output)
    check_kinds(NAME, dict(q=q, swa_k_cache=swa_k_cache), optional, {})
    if q.dim() != 3:
        refuse(NAME, f"q has shape {tuple(q.shape)}", "it takes [tokens, heads, 512]")
    caches, formats = [swa_k_cache], [_window_format()]
    selections = [_selection("swa", swa_indices, swa_lens, swa_ragged_indices, swa_ragged_indptr)]
    if not swa_only:
        if kv_cache is None:
            refuse(NAME, "swa_only is False without kv_cache", "pass the compressed cache, or swa_only=True")
        caches.append(kv_cache)
        formats.append(OCP)
        selections.append(_selection("topk", topk_indices, topk_lens, topk_ragged_indices, topk_ragged_indptr))
    rows = torch.empty_like(q) if output is None else output
    try:
        torch.ops.mla_suite.sparse_decode.out(
            q,
            caches,
            [indices for indices, _, _ in selections],
            [indptr for _, indptr, _ in selections],
            [lengths for _, _, lengths in selections],
            None if attn_sink is None else attn_sink[: q.shape[1]].float(),
            kv_formats=formats,
            softmax_scale=scale,
            split_size=OPEN if enable_batch_invariant else 0,
            out=rows,
            lse=q.new_empty(q.shape[:-1], dtype=torch.float32),
        )
    except (CallError, RuntimeError) as error:
        ragged = (number for number, (_, indptr, _) in enumerate(selections) if indptr is not None)
        restate(NAME, _WORDS | {f"indices[{number}]": f"{POOLS[number]}_ragged_indices" for number in ragged}, error)
    if output_mxfp8 is None:
        return 0
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import rocm_inverse_rope_mxfp8_rows

    rocm_inverse_rope_mxfp8_rows(rows, inv_rope_positions, inv_rope_cos_sin_cache, rope_head_dim, *output_mxfp8)
    return q.shape[0]


def _selection(
    name: str,
    dense: torch.Tensor | None,
    lengths: torch.Tensor | None,
    ragged: torch.Tensor | None,
    indptr: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(indices, indptr or None, lengths or None) of one pool, as `sparse_decode` takes them."""
    if ragged is not None and indptr is not None:
        return ragged.int(), indptr.int(), None
    if dense is None:
        possible = f"pass {name}_indices, or {name}_ragged_indices with {name}_ragged_indptr"
        refuse(NAME, f"{name} selects nothing", possible)
    slots = dense.reshape(dense.shape[0], dense.shape[1:].numel())  # -1 says nothing about a step without tokens
    return slots.int(), None, None if lengths is None else lengths.int()


def _window_format() -> str:
    """FNUZ where vLLM's encoder of the window writes it; OCP without vLLM."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return OCP
    return FNUZ if current_platform.fp8_dtype() is torch.float8_e4m3fnuz else OCP
