"""append_kv on native kernels: tensors and the numbers of a KV format become parameters and a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common.combine import missing
from mla_suite.build.params import pack_numbers, packer, reciprocal
from mla_suite.core import checks
from mla_suite.core.dispatch import Launch, Supported, Unsupported
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import Buffer, bind
from mla_suite.ops.append_kv import AppendKvArgs, Problem

WAVES = 8  # waves of a workgroup that writes one token
THREADS = 1024  # threads of a workgroup that writes several tokens
MAX_TOKENS = 512  # tokens of a workgroup
MAX_SINGLE_TOKENS = 8  # tokens for each compute unit: up to this number, a workgroup writes one
ENCODINGS = {"bf16": 0, "fp16": 1, "fp32": 2, "e4m3fn": 3, "e4m3fnuz": 4, "e8m0": 5}
IN_TYPES = {torch.bfloat16: ENCODINGS["bf16"], torch.float16: ENCODINGS["fp16"], torch.float32: ENCODINGS["fp32"]}
MAX_SCALE_GROUP = 128
_KNOWN = ", ".join(ENCODINGS)
MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True)
class AppendConfig:
    """The kernel for workgroups that write `tokens` tokens, 1 to MAX_TOKENS.

    bulk_bytes  dynamic shared memory of a workgroup that writes several tokens
    """

    arch: ArchSpec = field(repr=False)
    tokens: int
    bulk_bytes: int = 0

    @property
    def instance(self) -> str:
        return f"append_kv_tokens-{1 if self.tokens == 1 else MAX_TOKENS}"

    @property
    def threads(self) -> int:
        return WAVES * self.arch.wavefront if self.tokens == 1 else THREADS

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.bulk_bytes if self.tokens > 1 else 0

    def prepare(self, outputs: tuple[torch.Tensor, ...], args: AppendKvArgs) -> Launch:
        """The launch of the operator."""
        kv_c, kv_cache, cos_sin, positions = args.kv_c, args.kv_cache, args.cos_sin, args.positions
        tokens, latent = kv_c.shape
        num_pages, page_size, _ = kv_cache.shape
        slots = num_pages * page_size
        if tokens == 0 or slots == 0:
            return lambda outputs, tensors: None
        if slots > MAX_SLOTS:
            checks.fail("append_kv", "kv_cache", f"has {slots} slots", f"the native kernel takes {MAX_SLOTS}")
        numbers = _numbers(
            args.kv_format,
            self.tokens,
            (tokens, latent, args.k_pe.shape[1], slots, page_size),
            (kv_c.stride(0), args.k_pe.stride(0), 0 if cos_sin is None else cos_sin.stride(0)),
            kv_cache.stride(0) * kv_cache.element_size(),
            (kv_c.dtype, None if cos_sin is None else cos_sin.dtype),
            (args.slot_mapping.dtype, None if positions is None else positions.dtype),
            args.interleaved,
        )
        grid = (-(-tokens // self.tokens), 1, 1)
        shape = grid, self.threads, self.shared
        enqueue = bind("append_kv", self.instance, kv_c, *shape, _buffers, overlap=True)

        def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
            kv_c, k_pe, kv_cache, slot_mapping, kv_descale, cos_sin, positions = tensors
            pointers = _pack_pointers(
                kv_c.data_ptr(),
                k_pe.data_ptr(),
                kv_cache.data_ptr(),
                slot_mapping.data_ptr(),
                0 if kv_descale is None else kv_descale.data_ptr(),
                0 if cos_sin is None else cos_sin.data_ptr(),
                0 if positions is None else positions.data_ptr(),
            )
            enqueue(pointers + numbers, tensors)

        return launch


def supports(problem: Problem, arch: ArchSpec, bulk_bytes: int) -> Supported | Unsupported:
    kind = get_kv_format(problem.kv_format)
    unknown = kind.encodings - {*ENCODINGS, "pad"}
    if unknown:
        return Unsupported(f"kv_format {problem.kv_format} holds {', '.join(sorted(unknown))}; it takes {_KNOWN}")
    if kind.scale_rule is not None and kind.scale_rule.tile > MAX_SCALE_GROUP:
        given = f"kv_format {problem.kv_format} shares a scale among {kind.scale_rule.tile}"
        return Unsupported(f"{given}; it takes {MAX_SCALE_GROUP}")
    needed = min(kind.alignment, 4)  # bytes of the widest single store
    if problem.alignment < needed:
        given = f"kv_cache is aligned to {problem.alignment} bytes"
        return Unsupported(f"{given}; kv_format {problem.kv_format} needs {needed}")
    # A workgroup looks through all later slots, so beyond a few workgroups per compute unit they share the look: then
    # there is one for each unit, as far as its table goes.
    shared = min(-(-problem.tokens // arch.compute_units), MAX_TOKENS)
    config = AppendConfig(arch, shared if shared > MAX_SINGLE_TOKENS else 1, bulk_bytes)
    answer = Supported(config, f"{config.instance}, {config.tokens} to a workgroup, any kv_format")
    return missing(arch, config.instance) or answer


_POINTERS = ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_descale", "cos_sin", "positions")
_pack_pointers = packer(len(_POINTERS)).pack


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
    return pack_numbers(
        "append_kv",
        _POINTERS,
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


def _of_kv_format(kv_format: str, latent: int, rope: int, page: int) -> dict[str, int | float]:
    """The parameters that follow from the kv_format and the page size."""
    kind = get_kv_format(kv_format).sized(latent, rope)
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


def _buffers(*tensors: torch.Tensor | None) -> Iterator[Buffer]:
    for name, tensor in zip(_POINTERS, tensors, strict=True):
        if tensor is not None:
            whole = name == "kv_cache"
            yield Buffer(name, _blocks(tensor) if whole else tensor, "rw" if whole else "r")


def _blocks(kv_cache: torch.Tensor) -> torch.Tensor:
    """The bytes of the cache's tokens, without the room between blocks, which is not written."""
    pages, page, width = kv_cache.shape
    block = page * width
    rows = kv_cache.as_strided((pages, block), (kv_cache.stride(0) if pages > 1 else block, 1))
    return rows.view(torch.uint8)
