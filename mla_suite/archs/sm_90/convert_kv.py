"""convert_kv on sm_90: a kernel for each pair of elements that differ in more than their places."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, inf
from typing import NamedTuple

import torch

from mla_suite.archs import ArchSpec
from mla_suite.build.params import divisor
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import Field, KVFormat, ScaleRule, get_kv_format
from mla_suite.kv_formats.cache import sized_to
from mla_suite.kv_formats.declare import ENCODING_BITS
from mla_suite.launch import missing
from mla_suite.launch.spec import CallSpec, LaunchSpec, inputs, present
from mla_suite.ops.convert_kv import ConvertKvArgs, Problem, row

UNIT = 16  # values of a lane
LANES = 32
TOKENS = 8  # of a warp; half as many between the encodings that STREAMS names
STREAMS = {("bf16", "e4m3"), ("fp16", "e4m3"), ("e4m3", "bf16"), ("e4m3", "fp16")}
WARPS = 4  # of a block
PASS = UNIT * LANES  # values of a row that a warp takes at once
ELEMENTS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "e4m3fn": "e4m3", "e4m3fnuz": "e4m3fnuz", "e2m1": "e2m1"}
"""Encoding of latents -> its name in csrc/sm_90/convert_kv/elements.hpp."""


class Scales(NamedTuple):
    """The scales with which kernels take an element."""

    encodings: tuple[str, ...]
    tiles: tuple[int, ...]  # values that share one: as many lanes have them as a shuffle reduces
    smallest: float  # from here on the scale, or half of FNUZ's, and its reciprocal are normal numbers
    divisor: float  # at most: quotients of a larger one would not saturate where the encoding does
    powers: bool = False  # of two, and no others


TILES = (16, 32, 64, 128, 256, 512)
SCALES = {
    "e4m3fn": Scales(("fp32", "e8m0"), TILES, 2.0**-126, inf),
    "e4m3fnuz": Scales(("fp32", "e8m0"), TILES, 2.0**-125, 224.0, powers=True),
    "e2m1": Scales(("e4m3fn",), (UNIT,), 2.0**-9, 6.0),
}
MAX_SCALE_BYTES = 32  # of a token, in shared memory


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
        width = row(get_kv_format(args.source_format), args.source)
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
    formats = get_kv_format(problem.source_format), get_kv_format(problem.destination_format)
    for fmt in formats:
        if unfit := _unfit(fmt, problem.width):
            return Unsupported(f"kv_format {fmt.name} has {unfit}")
    if not problem.countable:
        return Unsupported("a cache has 2^31 slots or more, or as many bytes in a page; the kernel counts in 31 bits")
    source, destination = (ELEMENTS[fmt.by_name["latent"].encoding] for fmt in formats)
    config = ConvertConfig(arch, source, destination)
    return missing(arch, config.instance) or Supported(config, f"{config.instance}, {config.tokens} tokens to a warp")


def _unfit(fmt: KVFormat, width: int) -> str:
    """What a kv_format has that the kernels do not read and write, and what they take; empty where there is nothing."""
    fmt = sized_to(fmt, width)
    latent, rope, scale, pad = map(fmt.by_name.get, ("latent", "rope", "scale", "pad"))
    assert latent is not None
    if latent.encoding not in ELEMENTS or latent.count % UNIT:
        return f"{latent.count} latents in {latent.encoding}; the kernel takes {UNIT}s in {', '.join(ELEMENTS)}"
    if rope is not None and (scale is None or rope.encoding != "bf16" or not fmt.flavour):
        return f"rope values in {rope.encoding} behind {latent.encoding}; the kernel takes bf16 behind scaled e4m3"
    if pad is not None:
        behind = scale is not None and replace(
            scale, name="pad", encoding="pad", count=1, offset=scale.offset + scale.count
        )
        if rope is None or pad != behind:
            return (
                f"{pad.count} bytes of padding; the kernel takes one behind scales of a byte, in rows with rope values"
            )
    for part, size in ((latent, min(UNIT * ENCODING_BITS[latent.encoding] // 8, 16)), (rope, 16), (scale, 4)):
        if part is not None and (place := gcd(part.offset, part.stride, part.per_block)) % size:
            return f"{part.name}s at multiples of {gcd(place, 16)} bytes; the kernel copies {size} at once"
    if scale is None or fmt.scale_rule is None:
        return "" if latent.encoding != "e2m1" else "values in e2m1 without scales; the kernel takes scaled ones"
    return _unfit_scales(fmt.scale_rule, scale, latent, width)


def _unfit_scales(rule: ScaleRule, scale: Field, latent: Field, width: int) -> str:
    """The same of scales."""
    known = SCALES.get(latent.encoding)
    if known is None or scale.encoding not in known.encodings:
        taken = "none" if known is None else " or ".join(known.encodings)
        return f"scales in {scale.encoding} for {latent.encoding}; the kernel takes {taken}"
    if not rule.power_of_two and (known.powers or scale.encoding == "e8m0"):
        return f"scales in {scale.encoding} of any bits for {latent.encoding}; the kernel takes powers of two"
    if rule.tile not in known.tiles or scale.bytes > MAX_SCALE_BYTES:
        taken = f"one for {', '.join(map(str, known.tiles))}, and {MAX_SCALE_BYTES} bytes of them"
        return f"{scale.count} scales, each for {rule.tile} values, in {scale.bytes} bytes; the kernel takes {taken}"
    if not scale.count * rule.tile == latent.count <= width // PASS * PASS:
        given = f"scales for {scale.count * rule.tile} of {latent.count} latents in rows of {width} values"
        return f"{given}; the kernel takes scales for all latents, which the row's whole {PASS}s hold"
    if rule.smallest < known.smallest or rule.divisor > known.divisor:
        given = f"scales from {rule.smallest:.3g} on, for quotients up to {rule.divisor:g}"
        return f"{given}; the kernel takes {known.smallest:.3g} and {known.divisor:g}"
    return ""


def holds_in_bf16(fmt: KVFormat, descaled: bool) -> bool:
    """Whether bf16 holds every value of a cache: codes times a scale of few bits, or bf16."""
    encodings = fmt.encodings
    return not (descaled or "fp16" in encodings or "fp32" in encodings)


_POINTERS = inputs(ConvertKvArgs)


@lru_cache(maxsize=1024)
def _place(kv_format: str, width: int, page: int) -> dict[str, int | float]:
    """What a KvPlace has of a kv_format and a page size."""
    fmt = sized_to(get_kv_format(kv_format), width)
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
