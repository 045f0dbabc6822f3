"""Values to stored elements and back, one encoding at a time, by the rules that `declare` states."""

from __future__ import annotations

from itertools import pairwise

import torch

from mla_suite.kv_formats.declare import FP8_LARGEST, KVFormat, ScaleRule

ELEMENT_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e8m0": torch.float8_e8m0fnu,
    "e2m1": torch.uint8,
    "pad": torch.uint8,
}
"""The torch dtype whose bytes an encoding's elements are; two elements of e2m1 share a byte."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three low bits of e2m1; the fourth is the sign."""


_BYTE_VALUES = {
    encoding: torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)
    for encoding, dtype in ELEMENT_DTYPES.items()
    if dtype.itemsize == 1 and encoding != "e2m1"
}
"""fp32 value of each byte."""


def decode(stored: torch.Tensor, encoding: str) -> torch.Tensor:
    """fp32 values of `stored`, a contiguous tensor whose bytes hold elements of `encoding`."""
    if encoding == "e2m1":
        return _decode_e2m1(stored.view(torch.uint8))
    if encoding in _BYTE_VALUES and stored.device.type == "cpu":
        # A table is five times as fast as torch's cast (0.55 and 3.1 ms per million values on one core).
        codes = stored.view(torch.uint8)
        return _BYTE_VALUES[encoding].index_select(0, codes.flatten().int()).view(codes.shape)
    return stored.view(ELEMENT_DTYPES[encoding]).to(torch.float32)


def encode(values: torch.Tensor, encoding: str) -> torch.Tensor:
    """`values` (fp32) rounded to nearest even into `encoding`; fp8 and fp4 saturate at their largest value."""
    if encoding == "e2m1":
        return _encode_e2m1(values)
    largest = FP8_LARGEST.get(encoding)
    if largest is not None:
        # Casting alone is not portable: torch before 2.13 turns values beyond the range into NaN.
        values = values.clamp(-largest, largest)
    return values.to(ELEMENT_DTYPES[encoding])


def _decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=codes.device)
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()
    return torch.where(halves > 7, -magnitudes[halves & 7], magnitudes[halves & 7])


def _encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Two values to a byte. There is no NaN: it is stored as 0, and its tile's scale is NaN."""
    size = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for lower, (below, above) in enumerate(pairwise(E2M1_MAGNITUDES)):
        middle = (below + above) / 2
        code += (size >= middle) if lower % 2 else (size > middle)  # a tie goes to the even code
    code |= (values.signbit() & (values == values)).to(torch.uint8) << 3  # of a value that is rounded to zero as well
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def tile_scales(values: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """fp32 scales `[..., n / tile]` of `values` `[..., n]`; NaN for a tile that holds NaN or inf."""
    amax = values.unflatten(-1, (-1, rule.tile)).abs().amax(dim=-1)
    divisor = amax.new_full((), rule.divisor)  # torch multiplies by the reciprocal of a number on a GPU
    scales = (amax / divisor).clamp(min=rule.smallest)
    if rule.power_of_two:
        scales = _power_of_two_at_least(scales)
    return torch.where(amax.isfinite(), scales, torch.nan)


def _power_of_two_at_least(values: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(values)) for positive finite values, from the exponent itself, so no logarithm is rounded."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.ones_like(values), exponent - (mantissa == 0.5).to(exponent.dtype))


def encode_rows(kv_format: KVFormat, rows: torch.Tensor, descale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Each stored field of `rows` (fp32 `[..., head_dim]`) by name, as tensors `[..., count]` of the field's dtype."""
    stored, rule = {}, kv_format.scale_rule
    if rule is not None:
        scaled, others = rows.split((kv_format.scaled, kv_format.head_dim - kv_format.scaled), dim=-1)
        encoding = kv_format.by_name["scale"].encoding
        stored["scale"] = encode(tile_scales(scaled, rule), encoding)
        tiles = scaled.unflatten(-1, (-1, rule.tile)) / decode(stored["scale"], encoding).unsqueeze(-1)
        rows = torch.cat((tiles.flatten(-2), others), dim=-1)
    elif descale is not None:
        rows = rows / descale
    fields = kv_format.value_fields
    for field, values in zip(fields, rows.split([field.count for field in fields], dim=-1), strict=True):
        stored[field.name] = encode(values, field.encoding)
    if "pad" in kv_format.by_name:
        stored["pad"] = rows.new_zeros((*rows.shape[:-1], kv_format.by_name["pad"].count), dtype=torch.uint8)
    return stored


def decode_rows(kv_format: KVFormat, stored: dict[str, torch.Tensor], descale: torch.Tensor | None) -> torch.Tensor:
    """The fp32 rows `[..., head_dim]` that contiguous `stored` fields hold; the inverse of `encode_rows`."""
    parts = [decode(stored[field.name], field.encoding) for field in kv_format.value_fields]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if kv_format.scale_rule is not None:
        scales = decode(stored["scale"], kv_format.by_name["scale"].encoding)
        rows[..., : kv_format.scaled].unflatten(-1, (-1, kv_format.scale_rule.tile)).mul_(scales.unsqueeze(-1))
    return rows if descale is None else rows * descale
