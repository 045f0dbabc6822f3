"""SGLang's trees of drafts: its masks as `tree_mask`, and masks of drafts alone where it would make them of all keys.

SGLang describes a tree with a bool for each draft and each key before it, or for each two drafts alone: a
`TreeMaskMode`. Both of its workers that draft trees can do the latter, which costs bytes instead of megabytes: EAGLE's
asks the backend for its mode, and that of n-grams has a constant in its module.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_suite.ops.decode import MAX_TREE


def drafted(model_runner: Any, topk: int | None, drafts: int | None) -> str | None:
    """The worker, "eagle" or "ngram", that drafts trees in this server which `tree_mask` can describe; else None."""
    if not drafts or drafts > MAX_TREE or model_runner.is_draft_worker:
        return None
    algorithm = model_runner.spec_algorithm
    if algorithm.is_ngram():
        return "ngram"
    return "eagle" if (algorithm.is_eagle() or algorithm.is_standalone()) and (topk or 1) > 1 else None


def small_ngram_masks() -> None:
    """Let the worker of n-grams hand over masks of drafts alone."""
    from sglang.srt.speculative import ngram_worker

    ngram_worker.USE_FULL_MASK = False


def small_mask(max_bs: int, drafts: int, device: Any) -> Any:
    """A buffer for the masks of `max_bs` sequences, with the mode in which EAGLE's worker is to fill it.

    It is a little larger than that, since SGLang copies a mask with one key before the drafts into it at capture.
    """
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    buffer = torch.zeros(max_bs * drafts * (drafts + 1), dtype=torch.uint8, device=device)
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs)


def words(mask: torch.Tensor, batch: int, drafts: int) -> torch.Tensor:
    """`tree_mask` int64 [batch, drafts] of SGLang's mask of drafts alone, whose first batch x drafts x drafts count."""
    seen = mask[: batch * drafts * drafts].view(batch, drafts, drafts).long()
    return (seen << torch.arange(drafts, device=mask.device)).sum(-1)
