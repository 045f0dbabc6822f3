"""The KV cache formats, each declared once; kernels, packers, checks and the printed byte map derive from them.

`get_kv_format(name)` finds one and needs no torch. Where torch is installed, `empty`, `pack`, `unpack` and `validate`
make caches and move values in and out of them: `pack("dsv4", rows)`.
"""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from types import MappingProxyType

from mla_suite.errors import UsageError
from mla_suite.kv_formats.declare import FP8_LARGEST, Field, KVFormat, ScaleRule, dense_fields, row_fields

__all__ = ["FP8_LARGEST", "KV_FORMATS", "Field", "KVFormat", "ScaleRule", "get_kv_format"]

LATENT = 512
ROPE = 64


def _dense(
    name: str, summary: str, encoding: str, dtypes: tuple[str, ...], per_tensor_descale: bool = False
) -> KVFormat:
    fields = dense_fields(encoding, LATENT, ROPE)
    alignment = {"bf16": 2, "fp16": 2, "fp32": 4}.get(encoding, 1)
    return KVFormat(name, summary, fields, dtypes, LATENT, alignment, per_tensor_descale=per_tensor_descale)


def _v32(name: str, summary: str, rule: ScaleRule, rope: int = ROPE) -> KVFormat:
    stride = 528 + 2 * rope
    fields = [Field("latent", "e4m3fn", 512, 0, stride), Field("scale", "fp32", 4, 512, stride)]
    if rope:
        fields.append(Field("rope", "bf16", rope, 528, stride))
    return KVFormat(name, summary, tuple(fields), ("uint8", "float8_e4m3fn"), LATENT, 16, scale_rule=rule)


def _dsv4(name: str, summary: str, encoding: str, dtype: str, divisor: float) -> KVFormat:
    fields = (
        Field("latent", encoding, 448, 0, 576),
        Field("rope", "bf16", 64, 448, 576),
        Field("scale", "e8m0", 7, 0, 8, per_block=576),
        Field("pad", "pad", 1, 7, 8, per_block=576),
    )
    rule = ScaleRule(tile=64, divisor=divisor, smallest=1e-4, power_of_two=True)
    # Padding to 576 keeps every block a whole number of token strides; 8 divides every offset at any page size.
    return KVFormat(name, summary, fields, ("uint8", dtype), 512, 8, scale_rule=rule, block_multiple=576)


def _v41(name: str, summary: str, encoding: str, scale: Field, rule: ScaleRule) -> KVFormat:
    """A V4.1 record: the whole row, its rotated end included, in one encoding, and the scales where `scale` says."""
    # In the split order the rows of a block lie `stride` apart, and blocks a whole number of rows.
    interleaved = scale.per_block == 0
    stride = scale.stride if interleaved else scale.per_block
    fields = (*row_fields(encoding, 448, 64, stride), scale)
    multiple = 1 if interleaved else stride
    return KVFormat(
        name, summary, fields, ("uint8", "float8_e4m3fn"), 512, 16, scale_rule=rule, block_multiple=multiple
    )


_V32_RULE = ScaleRule(tile=128, divisor=448.0, smallest=2.0**-126, power_of_two=False)
_V41 = Field("scale", "e8m0", 16, 0, 16, per_block=512)
_V41_INTERLEAVED = Field("scale", "e8m0", 16, 512, 528)
_V41_RULE = ScaleRule(tile=32, divisor=448.0, smallest=1e-4, power_of_two=True)
# vLLM bounds the largest magnitude, not the scale.
_V41_RULE_OF_VLLM = ScaleRule(tile=32, divisor=448.0, smallest=1e-4 / 448.0, power_of_two=True)
_V41_FP4_RULE = ScaleRule(tile=16, divisor=6.0, smallest=2.0**-9, power_of_two=False)

_DECLARED = (
    _dense("bf16", "rows of bfloat16", "bf16", ("bfloat16",)),
    _dense("fp16", "rows of IEEE half", "fp16", ("float16",)),
    _dense("fp32", "rows of float, for references and tests", "fp32", ("float32",)),
    _dense("fp8", "rows of OCP e4m3, one descale per tensor", "e4m3fn", ("float8_e4m3fn", "uint8"), True),
    _dense("fp8_fnuz", "rows of FNUZ e4m3, one descale per tensor", "e4m3fnuz", ("float8_e4m3fnuz", "uint8"), True),
    _v32("v32", "DeepSeek V3.2 record, fp32 scale per 128 values", _V32_RULE),
    _v32(
        "v32_pow2",
        "the V3.2 record written with powers of two as scales",
        ScaleRule(tile=128, divisor=448.0, smallest=1e-4, power_of_two=True),
    ),
    _v32("v32_nope", "the V3.2 record without rope values (GLM-5.3)", _V32_RULE, rope=0),
    _dsv4("dsv4", "DeepSeek V4 record, scales at the end of the block", "e4m3fn", "float8_e4m3fn", 448.0),
    # 224, not FNUZ's own 240: a FNUZ pattern is half its OCP value, so the values keep their OCP bytes and the scale
    # byte grows by one.
    _dsv4("dsv4_fnuz", "the V4 record with FNUZ values", "e4m3fnuz", "float8_e4m3fnuz", 224.0),
    _v41("v41", "DeepSeek V4.1 record, scales at the end of the block (SGLang)", "e4m3fn", _V41, _V41_RULE),
    _v41(
        "v41_interleaved", "the V4.1 record with each token's scales behind it", "e4m3fn", _V41_INTERLEAVED, _V41_RULE
    ),
    _v41(
        "v41_vllm", "v41_interleaved written with vLLM's smallest scale", "e4m3fn", _V41_INTERLEAVED, _V41_RULE_OF_VLLM
    ),
    _v41(
        "v41_fp4",
        "DeepSeek V4.1 record of 4-bit values, scales at the end of the block (SGLang)",
        "e2m1",
        Field("scale", "e4m3fn", 32, 0, 32, per_block=256),
        _V41_FP4_RULE,
    ),
    _v41(
        "v41_fp4_interleaved",
        "the 4-bit V4.1 record with each token's scales behind it (vLLM)",
        "e2m1",
        Field("scale", "e4m3fn", 32, 256, 288),
        _V41_FP4_RULE,
    ),
)

KV_FORMATS: MappingProxyType[str, KVFormat] = MappingProxyType({declared.name: declared for declared in _DECLARED})
"""Every declared kv_format by name."""


def get_kv_format(name: str | KVFormat) -> KVFormat:
    """The declared kv_format called `name`, or the record itself; ValueError lists the names where there is none."""
    found = name if isinstance(name, KVFormat) else KV_FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        near = difflib.get_close_matches(str(name), KV_FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"kv_format {name!r} is unknown; the kv_formats are {', '.join(KV_FORMATS)}{hint}")
    return found


if find_spec("torch") is not None:
    from mla_suite.kv_formats.cache import empty as empty
    from mla_suite.kv_formats.cache import pack as pack
    from mla_suite.kv_formats.cache import unpack as unpack
    from mla_suite.kv_formats.cache import validate as validate
