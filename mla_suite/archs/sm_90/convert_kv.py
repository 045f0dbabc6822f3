"""convert_kv on sm_90: a kernel for each pair of elements that differ in more than their places."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from mla_suite.archs import ArchSpec
from mla_suite.build.params import divisor
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import KVFormat, get_kv_format
from mla_suite.launch import missing
from mla_suite.launch.spec import CallSpec, LaunchSpec, inputs, present
from mla_suite.ops.convert_kv import ConvertKvArgs, Problem

UNIT = 16  # values of a lane
LANES = 32
TOKENS = 8  # of a warp; half as many between the encodings that STREAMS names
STREAMS = {("bf16", "e4m3"), ("fp16", "e4m3"), ("e4m3", "bf16"), ("e4m3", "fp16")}
WARPS = 4  # of a block
ELEMENTS = {"e4m3fn": "e4m3"}
"""Encoding -> its name in csrc/sm_90/convert_kv/elements.hpp, where that differs."""


@dataclass(frozen=True)
class ConvertConfig:
    """The kernel that reads one element and writes another."""

    arch: ArchSpec = field(repr=False)
    source: str
    destination: str

    @property
    def instance(self) -> str:
        return f"convert_kv_source-{self.source}_destination-{self.destination}"

    @property
    def tokens(self) -> int:
        """Tokens of a warp."""
        return TOKENS // 2 if (self.source, self.destination) in STREAMS else TOKENS

    def spec(self, outputs: tuple[torch.Tensor, ...], args: ConvertKvArgs) -> CallSpec:
        """One launch."""
        tokens = args.source_slots.shape[0]
        caches = (args.source, args.source_format), (args.destination, args.destination_format)
        if tokens == 0 or any(cache.shape[0] == 0 for cache, _ in caches):
            return CallSpec()
        width = _width(args)
        whole, rest = divmod(width // UNIT, LANES)
        numbers: dict[str, int | float] = dict(
            tokens=tokens,
            wide_source=int(args.source_slots.dtype == torch.int64),
            wide_destination=int(args.destination_slots.dtype == torch.int64),
            whole=whole,
            rest=rest,
            rest_tokens=LANES // rest if rest else 0,
            parts=whole + (rest > 0),
            few_bits=int(holds_in_bf16(get_kv_format(args.source_format), args.source_descale is not None)),
        )
        for side, (cache, name) in enumerate(caches):
            place = _place(name, width, cache.shape[1])
            place = dict(
                block_bytes=cache.stride(0) * cache.element_size(), slots=cache.shape[0] * cache.shape[1], **place
            )
            numbers |= {f"{key}_{side}": value for key, value in place.items()}
        grid = (-(-tokens // (self.tokens * WARPS)), 1, 1)
        pointers = present(args, _POINTERS)
        return CallSpec((LaunchSpec(self.instance, grid, WARPS * LANES, 0, True, "convert_kv", numbers, pointers),))


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    """The kernel of the pair; bytes that are copied as they are go elsewhere."""
    if problem.copied:
        return Unsupported("bytes are copied as they are; Triton's copies take the time of a device copy")
    if problem.width % UNIT:
        return Unsupported(f"rows have {problem.width} values; a lane of the kernel takes {UNIT}")
    if problem.alignment < 16:
        given = f"a cache is aligned to {problem.alignment} bytes"
        return Unsupported(f"{given}; loads and stores of 16 bytes do not reach its rows")
    if not problem.countable:
        return Unsupported("a cache has 2^31 slots or more, or as many bytes in a page; the kernel counts in 31 bits")
    source, destination = (_element(name) for name in (problem.source_format, problem.destination_format))
    config = ConvertConfig(arch, source, destination)
    return missing(arch, config.instance) or Supported(config, f"{config.instance}, {config.tokens} tokens to a warp")


def _element(kv_format: str) -> str:
    encoding = get_kv_format(kv_format).by_name["latent"].encoding
    return ELEMENTS.get(encoding, encoding)


def holds_in_bf16(fmt: KVFormat, descaled: bool) -> bool:
    """Whether bf16 holds every value of a cache: codes times a scale of few bits, or bf16."""
    encodings = fmt.encodings
    return not (descaled or "fp16" in encodings or "fp32" in encodings)


_POINTERS = inputs(ConvertKvArgs)


def _width(args: ConvertKvArgs) -> int:
    fmt = get_kv_format(args.source_format)
    return args.source.shape[-1] if fmt.dense else fmt.head_dim


@lru_cache(maxsize=1024)
def _place(kv_format: str, width: int, page: int) -> dict[str, int | float]:
    """What a KvPlace has of a kv_format and a page size."""
    fmt = get_kv_format(kv_format)
    fmt = fmt.sized(width, 0) if fmt.seamless else fmt
    rule, scale = fmt.scale_rule, fmt.by_name.get("scale")
    found: dict[str, int | float] = dict(page=page, **divisor("page", page), latent_units=fmt.latent // UNIT)
    for name in ("latent", "rope", "scale"):
        own = fmt.by_name.get(name)
        found[f"{name}_base"] = 0 if own is None else own.start(0, page)
        found[f"{name}_stride"] = 0 if own is None else own.stride
    found["scale_bytes"] = 0 if scale is None else scale.bytes // scale.count
    found["scale_words"] = 0 if scale is None else -(-scale.bytes // 4)
    found["scale_shift"] = 0 if rule is None else (rule.tile // UNIT).bit_length() - 1
    found["pad"] = int("pad" in fmt.by_name)
    found["reciprocal"] = 1.0 if rule is None else 1.0 / rule.divisor
    found["divisor"] = 1.0 if rule is None else rule.divisor
    found["smallest"] = 0.0 if rule is None else rule.smallest
    found["power_of_two"] = int(rule is not None and rule.power_of_two)
    return found
