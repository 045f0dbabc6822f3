"""Single attention layers at the sizes of published models, each a decode step that can be run again from its start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

import mla_suite
from mla_suite import kv_formats
from mla_suite.archs import ArchSpec
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table
from mla_suite.models.rope import rotate

GPU_MODE_BATCHES, GPU_MODE_PREFILLS = (1, 2), (128, 512)
FP8_LARGEST = 448.0


@dataclass(frozen=True)
class Part:
    """One decode step of one layer.

    operators  those whose kernels the step is there to show
    step       runs the step from the same state every time; -> `y` and what it wrote, the caches as bytes or values
    """

    title: str
    operators: tuple[str, ...]
    step: Callable[[], dict[str, torch.Tensor]]


def parts(arch: ArchSpec) -> Iterator[tuple[str, Callable[[], list[Part]]]]:
    """Yields the parts shown on an arch: (what takes time to make, the call that makes it)."""
    if arch.fp8 != "ocp":  # the R1 layer has a cache of OCP fp8
        yield "weights of the GPU MODE layer", gpu_mode_layer
    else:
        yield "weights of an R1 layer", dense_layers
    yield "weights of a V4-style layer", lambda: [sparse_layer()]


def gpu_mode_layer() -> list[Part]:
    """The decode step of GPU MODE's layer over a contiguous cache, at two batches and two prefills."""
    layer = _layer(MLAConfig.gpu_mode_2025(), "bf16")
    steps = [
        _dense(layer, "GPU MODE amd-mla-decode layer", (prefill,) * batch, page_size=prefill + 1)
        for batch in GPU_MODE_BATCHES
        for prefill in GPU_MODE_PREFILLS
    ]
    return [replace(step, operators=(*step.operators, "combine")) for step in steps]


def dense_layers() -> list[Part]:
    """R1's layer over paged bf16 and fp8 caches, and a rank of four that verifies three speculated tokens."""
    config = replace(MLAConfig.deepseek_r1(), max_position=4096)
    whole = _layer(config, "bf16")
    quantised = _layer(config, "fp8", whole)
    rank = _layer(config.for_rank(4), "fp8", whole)
    return [
        _dense(whole, "R1 layer", (700, 90)),
        _dense(quantised, "R1 layer", (700, 90)),
        _dense(rank, "R1 layer, one of 4 ranks", (700, 90), q_len=4),
    ]


def _dense(layer: MLA, name: str, prefills: tuple[int, ...], *, page_size: int = 64, q_len: int = 1) -> Part:
    """A step of `q_len` tokens for each sequence over a cache of as many tokens as `prefills` says."""
    config = layer.config
    draw = torch.Generator().manual_seed(q_len * sum(prefills))
    pages = sum(-(-(n + q_len) // page_size) for n in prefills)
    cache = PagedLatentCache(1, pages, page_size, kv_format=layer.kv_format)
    sequences = [cache.allocate() for _ in prefills]
    cache.append(sequences, list(prefills))
    rows = torch.empty(pages, page_size, 576).normal_(generator=draw)
    scaled = kv_formats.get_kv_format(layer.kv_format).per_tensor_descale
    descale = rows.abs().max() / FP8_LARGEST if scaled else None
    filled = kv_formats.pack(layer.kv_format, rows, descale=descale)
    x = torch.empty(len(prefills), q_len, config.hidden_size, dtype=torch.bfloat16).normal_(generator=draw)
    angles = cos_sin_table(config, dtype=torch.float32 if config.cache_rotated else torch.bfloat16)  # as the task's
    where = cache.append(sequences, [q_len] * len(prefills))

    def step() -> dict[str, torch.Tensor]:
        kv_cache = filled.clone()
        plan = mla_suite.plan(where.seq_lens, num_heads=config.num_heads, max_seqlen_q=q_len)
        y = layer.decode(x, kv_cache, where, angles, plan=plan, kv_descale=descale)
        return {"y": y, "cache": kv_cache}

    title = f"{name}, {config.num_heads} heads, {layer.kv_format} cache, lengths {prefills}, q_len {q_len}"
    return Part(title, ("plan", "append_kv", "decode"), step)


def sparse_layer() -> Part:
    """A layer in the style of DeepSeek V4: keys of 448 + 64 values that are the values too, two pools, a sink.

    The new token goes into a pool of 256-token pages; each query sees the last 128 tokens of its sequence and 512 of
    another pool of compressed tokens, which an indexer would choose and here a draw does. The rope part of the output
    is rotated back by the query's position before the output projection.
    """
    hidden, q_lora, heads, head_dim, rope = 4096, 1024, 64, 512, 64
    lengths, page, window, topk = (700, 90), 256, 128, 512
    draw = torch.Generator().manual_seed(4)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return _drawn((outputs, inputs), draw)

    q_down, q_up, kv_down = weight(q_lora, hidden), weight(heads * head_dim, q_lora), weight(head_dim, hidden)
    o_proj = weight(hidden, heads * head_dim)
    sink = torch.empty(heads).normal_(generator=draw)
    pages = [-(-(n + 1) // page) for n in lengths]
    filled = kv_formats.pack("dsv4", torch.empty(sum(pages), page, head_dim).normal_(generator=draw))
    compressed = kv_formats.pack("dsv4", torch.empty(20, 64, head_dim).normal_(generator=draw))
    x = torch.empty(len(lengths), 1, hidden, dtype=torch.bfloat16).normal_(generator=draw)
    first = [sum(pages[:b]) * page for b in range(len(lengths))]  # slot of each sequence's token 0: pages in order
    slots = torch.tensor([start + n for start, n in zip(first, lengths, strict=True)])
    recent = slots[:, None] - torch.arange(window)
    seen = torch.where(recent >= torch.tensor(first)[:, None], recent, -1).int()[:, None]
    chosen = torch.stack([torch.randperm(20 * 64, generator=draw)[:topk] for _ in lengths]).int()[:, None]
    positions = torch.tensor(lengths)
    table = cos_sin_table(MLAConfig(hidden, heads, q_lora, max_position=max(lengths) + 1))
    angles = table[positions][:, None, None]
    back = angles * torch.cat((torch.ones(rope // 2), -torch.ones(rope // 2)))  # the opposite angle: -sin
    selected = torch.tensor([window + topk] * len(lengths), dtype=torch.int32)

    def step() -> dict[str, torch.Tensor]:
        kv_cache = filled.clone()
        q = (x @ q_down.T @ q_up.T).view(len(lengths), 1, heads, head_dim)
        q = torch.cat((q[..., :-rope], rotate(q[..., -rope:], angles, interleaved=True)), dim=-1)
        kv = (x @ kv_down.T)[:, 0]
        mla_suite.append_kv(
            kv[:, :-rope], kv[:, -rope:].contiguous(), kv_cache, slots, None, table, positions, kv_format="dsv4"
        )
        plan = mla_suite.plan(selected, num_heads=heads)
        out, _ = mla_suite.sparse_decode(
            q,
            [kv_cache, compressed],
            [seen, chosen],
            attn_sink=sink,
            plan=plan,
            kv_formats=["dsv4", "dsv4"],
            softmax_scale=head_dim**-0.5,
        )
        out = torch.cat((out[..., :-rope], rotate(out[..., -rope:], back, interleaved=True)), dim=-1)
        return {"y": out.flatten(-2) @ o_proj.T, "cache": kv_cache}

    title = f"V4-style layer, {heads} heads, dsv4 pools: {window} recent + {topk} compressed tokens, sink"
    return Part(title, ("plan", "append_kv", "sparse_decode"), step)


def _layer(config: MLAConfig, kv_format: str, like: MLA | None = None) -> MLA:
    """A layer of random bf16 weights, or of this rank's share of another's."""
    with torch.device("meta"):
        layer = MLA(config, kv_format=kv_format, dtype=torch.bfloat16)
    if like is not None and like.config == config:
        layer.load_state_dict(like.state_dict(), assign=True)
    elif like is not None:
        layer.to_empty(device="cpu")
        layer.load_weights(like.state_dict(), tp_size=like.config.num_heads // config.num_heads)
    else:
        draw = torch.Generator().manual_seed(97)
        norms = {name for name, module in layer.named_modules() if not isinstance(module, nn.Linear)}
        named = {}
        for name, parameter in layer.named_parameters():
            ones = name.rpartition(".")[0] in norms
            named[name] = torch.ones(parameter.shape).bfloat16() if ones else _drawn(tuple(parameter.shape), draw)
        layer.load_state_dict(named, assign=True)
    return layer


def _drawn(shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """A bf16 matrix that keeps the size of what it multiplies."""
    return torch.empty(shape, dtype=torch.bfloat16).normal_(generator=draw).div_(math.sqrt(shape[-1]))
