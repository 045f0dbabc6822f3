"""append_kv on our own kernels: tensors and the kv_format's numbers -> parameters -> launch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from mla_suite.build.params import load, reciprocal
from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Offer, Refusal, readied
from mla_suite.kv_formats import kv_format as declared
from mla_suite.launch import Buffer, bind, has_kernel

WAVES = 8  # of a workgroup of one token
THREADS = 1024  # of one of several tokens
MOST_TOKENS = 512  # of a workgroup
ROWS_UNDER_WAY = 90_112  # bytes of dynamic shared memory on NVIDIA (csrc/sm_90/append_kv/append_bulk.hpp)
SEVERAL = 8  # tokens for each compute unit: up to so many a workgroup has one
ENCODINGS = {"bf16": 0, "fp16": 1, "fp32": 2, "e4m3fn": 3, "e4m3fnuz": 4, "e8m0": 5}
IN_TYPES = {torch.bfloat16: ENCODINGS["bf16"], torch.float16: ENCODINGS["fp16"], torch.float32: ENCODINGS["fp32"]}
LONGEST_TILE = 128
MOST_SLOTS = 2**31 - 1


@dataclass(frozen=True)
class Config:
    """How many tokens a workgroup writes, 1 to MOST_TOKENS."""

    arch: Arch = field(repr=False)
    tokens: int

    @property
    def instance(self) -> str:
        return f"append_kv_tokens-{1 if self.tokens == 1 else MOST_TOKENS}"

    @property
    def threads(self) -> int:
        return WAVES * self.arch.wavefront if self.tokens == 1 else THREADS

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return ROWS_UNDER_WAY if self.arch.vendor == "nvidia" and self.tokens > 1 else 0


def offer(problem: Any, arch: Arch | None) -> Offer | Refusal:
    if arch is None:
        return Refusal("no arch of ours runs these tensors: it takes gfx942, gfx950 and sm_90, AMD's also emulated")
    kind = declared(problem.kv_format)
    if kind.scale_rule is not None and kind.scale_rule.tile > LONGEST_TILE:
        return Refusal(
            f"kv_format {problem.kv_format} shares a scale among {kind.scale_rule.tile}; it takes {LONGEST_TILE}"
        )
    needed = min(kind.alignment, 4)  # bytes of the widest single store
    if problem.alignment < needed:
        return Refusal(
            f"kv_cache is aligned to {problem.alignment} bytes; kv_format {problem.kv_format} needs {needed}"
        )
    # A workgroup looks through all later slots, so beyond a few workgroups per compute unit they share the look: then
    # there is one for each unit, as far as its table goes.
    shared = min(-(-problem.tokens // arch.compute_units), MOST_TOKENS)
    config = Config(arch, shared if shared > SEVERAL else 1)
    if not has_kernel(arch, config.instance):
        return Refusal(f"kernel {config.instance} is not built for {arch.name}; run `python -m mla_suite build`")
    return Offer(config, f"{config.instance}, {config.tokens} to a workgroup, any kv_format")


_POINTERS = ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_descale", "cos_sin", "positions")
_pack_pointers = struct.Struct(f"<{len(_POINTERS)}Q").pack


@lru_cache(maxsize=4096)
def _numbers(
    kv_format: str,
    group: int,
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, int, int],
    block_bytes: int,
    values: tuple[torch.dtype, torch.dtype | None],
    indices: tuple[torch.dtype, torch.dtype | None],
    interleaved: bool,
) -> bytes:
    """The parameters after the pointers. sizes: tokens, latent, rope, slots, page; strides: kv_c, k_pe, cos_sin."""
    tokens, latent, rope, slots, page = sizes
    packed = load("append_kv").pack(
        **dict.fromkeys(_POINTERS, 0),
        kv_c_stride=strides[0],
        k_pe_stride=strides[1],
        cos_sin_stride=strides[2],
        block_bytes=block_bytes,
        tokens=tokens,
        group=group,
        slots=slots,
        in_type=IN_TYPES[values[0]],
        angle_type=0 if values[1] is None else IN_TYPES[values[1]],
        wide_slots=int(indices[0] == torch.int64),
        wide_positions=int(indices[1] == torch.int64),
        interleaved=int(interleaved),
        **_of_kv_format(kv_format, latent, rope, page),
    )
    return packed[8 * len(_POINTERS) :]


def _of_kv_format(kv_format: str, latent: int, rope: int, page: int) -> dict[str, int | float]:
    """The parameters that follow from the kv_format and the page size."""
    kind = declared(kv_format).sized(latent, rope)
    rule = kind.scale_rule
    page_reciprocal, page_shift = reciprocal(page)
    found: dict[str, int | float] = dict(
        latent=latent,
        rope=rope,
        page=page,
        page_reciprocal=page_reciprocal,
        page_shift=page_shift,
        tile=0 if rule is None else rule.tile,
        divisor=1.0 if rule is None else rule.divisor,
        smallest=0.0 if rule is None else rule.smallest,
        power_of_two=int(rule is not None and rule.power_of_two),
        pad=kind.by_name["pad"].bytes if "pad" in kind.by_name else 0,
    )
    for name in ("latent", "rope", "scale", "pad"):
        field = kind.by_name.get(name)
        found[f"{name}_offset"] = 0 if field is None else field.offset
        found[f"{name}_stride"] = 0 if field is None else field.stride
        found[f"{name}_per_block"] = 0 if field is None else field.per_block
        if name != "pad":
            found[f"{name}_encoding"] = 0 if field is None else ENCODINGS[field.encoding]
    return found


def ready(
    config: Config,
    outputs: tuple[torch.Tensor, ...],
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_descale: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    kv_format: str,
    interleaved: bool = True,
) -> Callable[..., None]:
    tokens, latent = kv_c.shape
    pages, page, _ = kv_cache.shape
    slots = pages * page
    if tokens == 0 or slots == 0:
        return lambda *args, **kwargs: None
    if slots > MOST_SLOTS:
        raise ValueError(f"append_kv: kv_cache has {slots} slots; the native kernel takes {MOST_SLOTS}")
    numbers = _numbers(
        kv_format,
        config.tokens,
        (tokens, latent, k_pe.shape[1], slots, page),
        (kv_c.stride(0), k_pe.stride(0), 0 if cos_sin is None else cos_sin.stride(0)),
        kv_cache.stride(0) * kv_cache.element_size(),
        (kv_c.dtype, None if cos_sin is None else cos_sin.dtype),
        (slot_mapping.dtype, None if positions is None else positions.dtype),
        interleaved,
    )
    grid = (-(-tokens // config.tokens), 1, 1)
    shape = grid, config.threads, config.shared
    launch = bind("append_kv", config.instance, kv_c, *shape, _buffers, overlap=True)

    def start(
        outputs: tuple[torch.Tensor, ...],
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_descale: torch.Tensor | None = None,
        cos_sin: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        pointers = _pack_pointers(
            kv_c.data_ptr(),
            k_pe.data_ptr(),
            kv_cache.data_ptr(),
            slot_mapping.data_ptr(),
            0 if kv_descale is None else kv_descale.data_ptr(),
            0 if cos_sin is None else cos_sin.data_ptr(),
            0 if positions is None else positions.data_ptr(),
        )
        launch(pointers + numbers, (kv_c, k_pe, kv_cache, slot_mapping, kv_descale, cos_sin, positions))

    return start


def _buffers(*tensors: torch.Tensor | None) -> Iterator[Buffer]:
    for name, tensor in zip(_POINTERS, tensors, strict=True):
        if tensor is not None:
            whole = name == "kv_cache"
            yield Buffer(name, _blocks(tensor) if whole else tensor, "rw" if whole else "r")


def _blocks(kv_cache: torch.Tensor) -> torch.Tensor:
    """The bytes of the cache's tokens, without the room between blocks: what may be written."""
    pages, page, width = kv_cache.shape
    block = page * width
    rows = kv_cache.as_strided((pages, block), (kv_cache.stride(0) if pages > 1 else block, 1))
    return rows.view(torch.uint8)


BACKEND = readied("native", offer, ready)
run = BACKEND.run
