"""A step of vLLM as our dense backend sees it: the metadata of its sequences, and which of them are short prompts."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata

from mla_suite.integrations import pairs_saved


@dataclass
class MLASuiteDecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's decode metadata, the step's query lengths, and its plan, which all layers share.

    The first layer makes the plan. In a captured step it is captured with it, so a replay waits for no host. With
    decode context parallelism seq_lens and block_table are the rank's, and dcp_tot_seq_lens is of all ranks.
    """

    batch_invariant: bool = False
    max_seqlen_kv: int = 0  # bound on the seq_lens of an eager step
    plan: torch.Tensor | None = None
    max_seqlen_q: int = 1
    cu_seqlens_q: torch.Tensor | None = None  # None where every sequence has max_seqlen_q query tokens
    cp_interleave: int = 1  # with decode context parallelism: keys in a row that lie on one rank
    planned: bool = True
    first_token: int = 0  # of the step's, where the query tokens of these sequences begin
    prompts: MLASuiteDecodeMetadata | None = None  # of the sequences behind these, which are a call of their own


def prompts_gain(step: Any, most_drafts: int, longest: int) -> bool:
    """Returns whether a step's short prompts take less time with absorbed weights than with expanded keys.

    step     vLLM's CommonAttentionMetadata
    longest  as `absorbed_prompt` has it: the query tokens for which both take as long
    """
    lens, end = step.query_start_loc_cpu.diff(), step.seq_lens_cpu_upper_bound  # exact for prompts
    if step.max_query_len <= most_drafts or end is None:
        return False
    longer = lens > longest
    first_long = int(longer.int().argmax()) if bool(longer.any()) else len(lens)
    short = lens[:first_long] > most_drafts
    tokens = lens[:first_long][short]
    context = end[:first_long][short] - tokens
    return len(tokens) > 0 and pairs_saved(tokens.tolist(), context.tolist(), longest) <= 0


def query_lengths(query_start_loc: torch.Tensor, tokens: int, max_query_len: int) -> tuple[int, bool]:
    """Returns the most query tokens of a sequence, at least 1, and whether all have as many.

    Sequences at the end that pad a captured batch have none and count as the others. max_query_len is a bound, or 0.
    """
    batch = query_start_loc.shape[0] - 1
    q_len = 1 if max_query_len == 1 else max(int(query_start_loc.diff().max()), 1)
    last = int(query_start_loc[-1])
    if tokens != batch * q_len or last % q_len:
        return q_len, False
    if last == tokens:  # no sequence has more, so none has fewer
        return q_len, True
    starts = torch.arange(batch + 1, dtype=query_start_loc.dtype) * q_len
    return q_len, torch.equal(query_start_loc, starts.clamp(max=last))


def divided(
    step: MLASuiteDecodeMetadata,
    most_drafts: int,
    query_start_loc: torch.Tensor,
    on_device: torch.Tensor,
    tokens: int,
) -> MLASuiteDecodeMetadata:
    """Returns a step whose short prompts, which vLLM puts behind its decodes, are a call of their own without a plan.

    SM parts of a plan have as many row tiles as the longest sequence, and its partial results as many rows. Row tiles
    of a prompt occupy a GPU as they are.

    most_drafts      query tokens that a decode has at most; a prompt in its place has more
    query_start_loc  where the query tokens of each sequence begin, on the host
    on_device        the same on the device
    tokens           of the step, with those that pad it
    """
    decodes = int((query_start_loc.diff() > most_drafts).int().argmax())
    first = int(query_start_loc[decodes])
    own = on_device[decodes:] - first if first else on_device
    prompts = _part(step, slice(decodes, None), query_start_loc[decodes:] - first, own, tokens - first)
    prompts.planned, prompts.first_token = False, first
    if not decodes:
        return prompts
    ahead = slice(decodes + 1)
    others = _part(step, slice(decodes), query_start_loc[ahead], on_device[ahead], first)
    others.prompts = prompts
    return others


def _part(
    step: MLASuiteDecodeMetadata, sequences: slice, host: torch.Tensor, device: torch.Tensor, tokens: int
) -> MLASuiteDecodeMetadata:
    part = copy(step)
    part.seq_lens, part.block_table = step.seq_lens[sequences], step.block_table[sequences]
    part.max_seqlen_q, uniform = query_lengths(host, tokens, 0)
    part.cu_seqlens_q = None if uniform else device
    return part
