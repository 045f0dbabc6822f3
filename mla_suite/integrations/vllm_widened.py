"""Prompts of a sparse layer over vLLM's records: their keys in bf16, which many query tokens read in less time.

Every token reads the records that it selects and turns them into bf16. The keys of a prompt's sequence are turned into
bf16 once, page by page, in a workspace of vLLM's, and the prompt's tokens select from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonMetadata
from vllm.v1.attention.backends.utils import split_prefill_chunks
from vllm.v1.worker.workspace import current_workspace_manager

import mla_suite

FORMAT, DTYPE = "bf16", torch.bfloat16
LARGEST_PAGE = 1024  # tokens


@dataclass
class Prompts:
    """Sequences of a step that are widened together.

    sequences   rows of the step's block table
    tokens      their query tokens
    table       int32 [sequences, width], the pages of each in the workspace
    slots       int64 [rows], where these pages lie in the cache
    rows        int64 [rows], where they lie in the workspace: one behind the other
    """

    sequences: slice
    tokens: slice
    table: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor


@dataclass(kw_only=True)
class MLASuiteSparseMetadata(SparseMLACommonMetadata):
    """vLLM's metadata of a step, and which of its prompts are widened."""

    widened: list[Prompts] = field(default_factory=list)


def prompts_of(
    step: MLASuiteSparseMetadata,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    most_rows: int,
    rows_per_token: int,
) -> list[Prompts]:
    """Returns the prompts of a step that are worth it, in groups that fit a workspace of most_rows.

    seq_lens         [sequences] on the host, exact for prompts
    query_start_loc  [sequences + 1] on the host
    rows_per_token   that are widened in the time which a query token gains
    """
    first, page = step.num_decodes, step.block_size
    pages = -(-seq_lens[first:].long() // page)
    found = []
    for begin, end in split_prefill_chunks(pages * page, most_rows):
        sequences = slice(first + begin, first + end)
        tokens = slice(int(query_start_loc[sequences.start]), int(query_start_loc[sequences.stop]))
        counts = pages[begin:end]
        total = int(counts.sum())
        if total * page > rows_per_token * (tokens.stop - tokens.start):
            continue
        device = step.block_table.device
        starts = counts.cumsum(0) - counts
        owner = torch.repeat_interleave(counts)
        column = torch.arange(total) - starts[owner]
        owner, column, starts = (part.to(device, non_blocking=True) for part in (owner, column, starts))
        stored = step.block_table[sequences][owner, column].long()
        table = starts[:, None] + torch.arange(int(counts.max()), device=device)
        rows = torch.arange(total * page, device=device)
        slots = (stored[:, None] * page + rows[:page]).flatten()
        found.append(Prompts(sequences, tokens, table.int(), slots, rows))
    return found


def parts(widened: list[Prompts], tokens: int) -> Iterator[tuple[slice, Prompts | None]]:
    """Divides the tokens of a step: those of prompts that are widened together, and all others in between."""
    done = 0
    for prompts in widened:
        if done < prompts.tokens.start:
            yield slice(done, prompts.tokens.start), None
        yield prompts.tokens, prompts
        done = prompts.tokens.stop
    if done < tokens:
        yield slice(done, tokens), None


def most_rows(config: Any) -> int:
    """Returns the rows of a workspace that holds any sequence in whole pages."""
    return int(config.model_config.max_model_len) + LARGEST_PAGE


def workspace(rows: int, width: int) -> torch.Tensor:
    """Returns bf16 [rows, width] of vLLM's memory for scratch, which other layers and the experts use in turn."""
    found: torch.Tensor = current_workspace_manager().get_simultaneous(((rows, width), DTYPE))[0]
    return found


def widen(prompts: Prompts, cache: torch.Tensor, kv_format: str, width: int, most_rows: int) -> torch.Tensor:
    """Returns the sequences' keys as a cache of bf16, [pages, page, width] as `prompts.table` has them."""
    made = workspace(most_rows, width)[: len(prompts.rows)].unflatten(0, (-1, cache.shape[1]))
    mla_suite.convert_kv(cache, made, prompts.slots, prompts.rows, source_format=kv_format, destination_format=FORMAT)
    return made
