"""DeepSeek V4.1's own records in vLLM 0.33 on CUDA: 528 bytes a token, and 288 in the compressed pools.

One function of vLLM's attention decides, for SM100 alone, and all but two parts follow it (the table of
docs/vllm_sglang.md): a reader, which this backend is, and the writer of 288 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

import mla_suite
from mla_suite.core import checks
from mla_suite.integrations import refuse
from mla_suite.integrations.interface import Interface
from mla_suite.kv_formats import get_kv_format

RECORDS = "MLA_SUITE_V41_RECORDS"
NVFP4 = "nvfp4_ds_mla"  # vLLM's --kv-cache-dtype for 528 bytes in the window and 288 in the compressed pools
FP4 = get_kv_format("v41_fp4_interleaved")
PACKAGE = "vllm.models.deepseek_v41"
GATE, WRITER = "_use_v41_mxfp8_kv_record", "rope_quant_insert"
POOLS = "vllm.v1.attention.backends.mla.sparse_swa"
INSERT = ("latent", "positions", "cos_sin_cache", "kv_cache", "slot_mapping", "compress_ratio")


def asked(vllm_config: Any) -> bool:
    """Whether the environment or vLLM's own option asks for V4.1's records."""
    by_environment = checks.env_flag(RECORDS, os.environ.get("MLA_SUITE_V41_RECORDS", ""), "1")
    return by_environment or vllm_config.cache_config.cache_dtype == NVFP4


def take_records(version: str, kernels: ModuleType) -> None:
    """Have the layers of V4.1 of vLLM `version` store its records from now on, in this process.

    kernels  vLLM's module of the attention class; ValueError, in a sentence, where it is not V4.1's
    """
    otherwise = f"unset {RECORDS} and leave --kv-cache-dtype at fp8"
    if not kernels.__name__.startswith(f"{PACKAGE}."):
        given = "V4.1's records are asked for with another model"
        refuse("vllm_v41", given, f"V4's are of 584 bytes alone: {otherwise}")
    interface = Interface("vllm_v41", "vLLM", version, ("0.33", "0.33"), otherwise)
    # What tells the page order with scales behind their tokens, whose blocks hold whole rows, from the order before it.
    window = import_module(POOLS).DeepseekV4SWACache
    interface.takes("DeepseekV4SWACache", window.__init__, {"packed_block_stride_alignment"})
    attention, compressor = import_module(f"{PACKAGE}.attention"), import_module(f"{PACKAGE}.compressor")
    interface.has(attention.__name__, attention, (GATE,))
    interface.has(compressor.__name__, compressor, (WRITER,))
    theirs = getattr(compressor, WRITER)
    if not isinstance(theirs, partial):
        interface.takes(WRITER, theirs, INSERT, {"fp8_scale"})
        setattr(compressor, WRITER, partial(insert, theirs))
    setattr(attention, GATE, lambda: True)


def insert(
    theirs: Callable[..., None],
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
    fp8_scale: torch.Tensor | None = None,
) -> None:
    """vLLM's `rope_quant_insert`, whose records of 288 bytes `mla_suite.append_kv` writes.

    latent         [tokens, 512] bf16, un-rotated; its last 64 values are rotated, in pairs of neighbours
    positions      [tokens] int64; an entry is that of the token which ends a group of compress_ratio, 1 or 2, and is
                   rotated by the position of the group's first
    cos_sin_cache  [max_len, 64]; kv_cache [num_pages, page_size, 288] uint8; slot_mapping [tokens], negative for none
    """
    if (kv_cache.dtype, kv_cache.shape[-1]) != (torch.uint8, FP4.token_bytes):
        theirs(latent, positions, cos_sin_cache, kv_cache, slot_mapping, compress_ratio, fp8_scale=fp8_scale)
        return
    tokens = slot_mapping.numel()
    latent, positions = latent[:tokens], positions[:tokens]
    if compress_ratio > 1:
        slot_mapping = torch.where((positions + 1) % compress_ratio == 0, slot_mapping, -1)
        positions = positions // compress_ratio * compress_ratio
    mla_suite.append_kv(
        latent[:, : FP4.latent],
        latent[:, FP4.latent :],
        kv_cache,
        slot_mapping,
        cos_sin=cos_sin_cache,
        positions=positions,
        kv_format=FP4.name,
    )
