"""Layers of vLLM's code of DeepSeek V4 for CUDA, on a CPU: their caches, their metadata by vLLM's builders, and a step.

Triton's interpreter runs vLLM's kernels for metadata and for the gather of prefill. What that code asks of a GPU,
memory to gather into and FlashMLA's holder, has a stand-in.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton_on_cpu  # noqa: F401  # before vLLM
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

WINDOW, TOPK, DRAFTS, MAX_LEN, MAX_TOKENS = 128, 512, 3, 4096, 512
STRIDE = 93_888  # bytes between pages, in which pages of other layers lie as well; measured in vLLM's engine
ROWS = 3168  # bytes that hold whole records of 528 and of 288: vLLM 0.33 puts pages of V4.1's a multiple of it apart


@dataclass
class FlashMLASchedMeta:
    """The holder of vLLM's copy of FlashMLA, which its builds for CPUs lack."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


sparse_swa.get_mla_metadata = lambda: (FlashMLASchedMeta(), None)


class Version(NamedTuple):
    """One of vLLM's two model packages: its ratios, and the tokens of its blocks and of the window's."""

    package: str
    ratios: tuple[int, ...]  # the first has a window alone
    block: int
    window_page: int
    record: str = "dsv4"  # kv_format of the window, and of the compressed pool
    compressed: str = "dsv4"


V4 = Version("deepseek_v4", (1, 4, 128), 256, 64)
V41 = Version("deepseek_v41", (0, 1, 2), 64, 32)
V41_IN_ROWS = "packed_block_stride_alignment" in inspect.signature(sparse_swa.DeepseekV4SWACache.__init__).parameters
"""Whether scales of V4.1's own records are behind their tokens, as from vLLM 0.33 on, and not at the end of a page."""
V41_528 = V41._replace(record="v41_interleaved", compressed="v41_interleaved")
V41_288 = V41_528._replace(compressed="v41_fp4_interleaved")


def kernels_of(version: Version) -> types.ModuleType:
    """vLLM's module with the attention class for CUDA."""
    return importlib.import_module(f"vllm.models.{version.package}.nvidia.flashmla")


class Step(NamedTuple):
    """One step of a batch, decodes first: what vLLM's model runner knows of it."""

    q_lens: list[int]
    seq_lens: list[int]

    @property
    def positions(self) -> torch.Tensor:
        each = [torch.arange(n - q, n) for q, n in zip(self.q_lens, self.seq_lens, strict=True)]
        return torch.cat(each)

    @property
    def owners(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self.q_lens)), torch.tensor(self.q_lens))


class Pool(NamedTuple):
    """A layer's cache as vLLM allocates it, the rows in it, and the pages of each sequence."""

    cache: torch.Tensor  # uint8 [pages, page, bytes of a record]
    rows: torch.Tensor  # fp64 [pages, page, 512]
    table: torch.Tensor  # int32 [sequences, width]

    def of(self, sequence: int, entries: torch.Tensor) -> torch.Tensor:
        """The rows of a sequence's entries, by their place in it."""
        page = self.cache.shape[1]
        return self.rows[self.table[sequence, entries // page].long(), entries % page]


def pool(sequences: int, entries: int, page: int, kv_format: str) -> Pool:
    """A pool of records whose pages lie in no order; entries that nobody asks for are NaN."""
    record, stride = get_kv_format(kv_format), STRIDE if kv_format == "dsv4" else STRIDE // ROWS * ROWS
    width = -(-entries // page)
    pages = sequences * width + 1
    rows = torch.randn(pages, page, 512)
    packed = caches.pack(record, rows, padded=False)
    memory = torch.full((pages * stride + 64,), 255, dtype=torch.uint8)  # NaN between the pages
    memory = memory[-memory.data_ptr() % 16 :]
    held = memory.as_strided((pages, page * record.width), (stride, 1))
    held.copy_(packed.as_strided(held.shape, (packed.stride(0), 1)))
    cache = memory.as_strided(packed.shape, (stride, record.width, 1))
    table = torch.randperm(pages - 1).int().view(sequences, width)
    rows = caches.unpack(record, cache)
    return Pool(cache, (rows if kv_format == "dsv4" else rows.bfloat16()).double(), table)


def config(version: Version) -> Any:
    """The part of vLLM's configuration that its builders of metadata read."""
    hf_config = types.SimpleNamespace(sliding_window=WINDOW, index_topk=TOPK, compress_ratios=list(version.ratios))
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=MAX_LEN, hf_config=hf_config),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=16),
        speculative_config=types.SimpleNamespace(
            num_speculative_tokens=DRAFTS, parallel_drafting=False, use_dspark=lambda: False
        ),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=types.SimpleNamespace(cache_dtype="fp8_ds_mla"),
        attention_config=types.SimpleNamespace(backend=types.SimpleNamespace(name="MLA_SUITE_DSV4")),
        kv_transfer_config=None,
        use_v2_model_runner=False,
    )


def common(step: Step, table: torch.Tensor, page: int) -> CommonAttentionMetadata:
    starts = torch.nn.functional.pad(torch.tensor(step.q_lens).cumsum(0), (1, 0)).int()
    positions, owners = step.positions, step.owners
    lengths = torch.tensor(step.seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(step.q_lens),
        num_actual_tokens=len(positions),
        max_query_len=max(step.q_lens),
        max_seq_len=max(step.seq_lens),
        block_table_tensor=table,
        slot_mapping=table[owners, positions // page].long() * page + positions % page,
        positions=positions,
    )


def metadata(version: Version, ratio: int, step: Step, window: Pool, compressed: Pool | None) -> tuple[Any, Any]:
    """(metadata of the window, metadata of the compressed pool or None), made by vLLM's builders for CUDA."""
    kernels, vllm_config, names = kernels_of(version), config(version), ["layer"]
    sizes = dict(num_kv_heads=1, head_size=512, dtype=torch.uint8, model_version="deepseek_v4")
    sizes |= dict(cache_dtype_str="fp8_ds_mla", alignment=576 if version.record == "dsv4" else 512)
    sizes |= dict(state_content_bytes=window.cache.shape[-1])
    spec = SlidingWindowMLASpec(block_size=version.window_page, sliding_window=WINDOW, **sizes)
    builder = kernels.DeepseekSparseSWAFlashMLAMetadataBuilder(spec, names, vllm_config, torch.device("cpu"))
    found = builder.build(0, common(step, window.table, version.window_page))
    if compressed is None:
        return found, None
    spec = MLAAttentionSpec(block_size=version.block, tokens_per_state=ratio, **sizes)
    builder = kernels.DeepseekV4FlashMLABackend.get_builder_cls()(spec, names, vllm_config, torch.device("cpu"))
    return found, builder.build(0, common(step, compressed.table, version.block))


def layer(attention: type, ratio: int, heads: int, window: Pool, compressed: Pool | None, chosen: torch.Tensor) -> Any:
    """A layer of vLLM's class as far as its `forward_mqa` reads it."""
    made = attention.__new__(attention)
    torch.nn.Module.__init__(made)
    padded = attention.get_padded_num_q_heads(heads)
    settings = dict(
        prefix="layer", compress_ratio=ratio, window_size=WINDOW, scale=512**-0.5, topk_indices_buffer=chosen
    )
    settings |= dict(max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, max_image_tokens=0, use_pcp=False)
    settings |= dict(
        n_local_heads=heads, padded_heads=padded, _prefill_num_heads=padded, compressed_cache_prefix="layer"
    )
    settings |= dict(swa_cache_layer=types.SimpleNamespace(prefix="window", kv_cache=window.cache))
    made.__dict__.update(settings)
    sink = torch.full((padded,), -torch.inf)
    sink[:heads] = torch.randn(heads)
    made.attn_sink = sink
    made.kv_cache = None if compressed is None else compressed.cache
    made._compressed_kv_cache = lambda: made.kv_cache
    return made


def select(step: Step, ratio: int) -> torch.Tensor:
    """What an indexer leaves for each token: entries of its sequence that are closed, -1 behind them."""
    found = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
    for row, position in enumerate(step.positions.tolist()):
        closed = torch.randperm((position + 1) // max(ratio, 1))[:TOPK]
        found[row, : len(closed)] = closed.int()
    return found


def expected(
    version: Version, made: Any, step: Step, q: torch.Tensor, window: Pool, compressed: Pool | None
) -> torch.Tensor:
    """The definition, in fp64: the last WINDOW tokens and the selected entries, or with 128:1 all closed ones."""
    results = []
    ratio, chosen = made.compress_ratio, made.topk_indices_buffer
    for row, (owner, position) in enumerate(zip(step.owners.tolist(), step.positions.tolist(), strict=True)):
        keys = [window.of(owner, torch.arange(max(position - WINDOW + 1, 0), position + 1))]
        if compressed is not None:
            picked = torch.arange((position + 1) // ratio) if ratio == 128 else chosen[row][chosen[row] >= 0]
            keys.append(compressed.of(owner, picked))
        kv = torch.cat(keys)
        scores = q[row].double() @ kv.T * made.scale
        lse = torch.logaddexp(scores.logsumexp(-1), made.attn_sink.double())
        results.append(torch.exp(scores - lse[:, None]) @ kv)
    return torch.stack(results)


class _Workspace:
    """vLLM's memory for what a layer gathers; its own asks an accelerator for it."""

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.full(shape, -1).to(dtype) for shape, dtype in wanted]


def run(made: Any, q: torch.Tensor, step: Step, metadata: Sequence[Any]) -> torch.Tensor:
    """vLLM's `forward_mqa`, prefill and decode, into a buffer as its layer allocates one."""
    kernels = importlib.import_module(type(made).__mro__[1].__module__)
    window, compressed = metadata
    context = types.SimpleNamespace(attn_metadata={"window": window, "layer": compressed})
    output = torch.full_like(q, torch.nan)
    with mock.patch.multiple(kernels, get_forward_context=lambda: context, current_workspace_manager=_Workspace):
        made.forward_mqa(q, q, step.positions, output)
    return output
