"""The KV cache formats, each declared once; kernels, packers, checks and the printed byte map derive from them.

`get_kv_format(name)` finds one and needs no torch. Where torch is installed, `empty`, `pack`, `unpack` and `validate`
make caches and move values in and out of them: `pack("dsv4", rows)`.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import MappingProxyType

from mla_suite.errors import UsageError
from mla_suite.kv_formats.declare import FP8_LARGEST, Field, KVFormat, ScaleRule, dense_fields

__all__ = ["FP8_LARGEST", "KV_FORMATS", "Field", "KVFormat", "ScaleRule", "get_kv_format"]

LATENT = 512
ROPE = 64


def _dense(
    name: str, summary: str, encoding: str, dtypes: tuple[str, ...], per_tensor_descale: bool = False
) -> KVFormat:
    fields = dense_fields(encoding, LATENT, ROPE)
    alignment = {"bf16": 2, "fp16": 2, "fp32": 4}.get(encoding, 1)
    return KVFormat(name, summary, fields, dtypes, LATENT, alignment, per_tensor_descale=per_tensor_descale)


def _v32(name: str, summary: str, rule: ScaleRule) -> KVFormat:
    fields = (
        Field("latent", "e4m3fn", 512, 0, 656),
        Field("scale", "fp32", 4, 512, 656),
        Field("rope", "bf16", 64, 528, 656),
    )
    return KVFormat(name, summary, fields, ("uint8", "float8_e4m3fn"), LATENT, 16, scale_rule=rule)


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


_FP32_SMALLEST_NORMAL = 2.0**-126

_DECLARED = (
    _dense("bf16", "rows of bfloat16", "bf16", ("bfloat16",)),
    _dense("fp16", "rows of IEEE half", "fp16", ("float16",)),
    _dense("fp32", "rows of float, for references and tests", "fp32", ("float32",)),
    _dense("fp8", "rows of OCP e4m3, one descale per tensor", "e4m3fn", ("float8_e4m3fn", "uint8"), True),
    _dense("fp8_fnuz", "rows of FNUZ e4m3, one descale per tensor", "e4m3fnuz", ("float8_e4m3fnuz", "uint8"), True),
    _v32(
        "v32",
        "DeepSeek V3.2 record, fp32 scale per 128 values",
        ScaleRule(tile=128, divisor=448.0, smallest=_FP32_SMALLEST_NORMAL, power_of_two=False),
    ),
    _v32(
        "v32_pow2",
        "the V3.2 record written with powers of two as scales",
        ScaleRule(tile=128, divisor=448.0, smallest=1e-4, power_of_two=True),
    ),
    _dsv4("dsv4", "DeepSeek V4 record, scales at the end of the block", "e4m3fn", "float8_e4m3fn", 448.0),
    # 224, not FNUZ's own 240: a FNUZ pattern is half its OCP value, so the values keep their OCP bytes and the scale
    # byte grows by one.
    _dsv4("dsv4_fnuz", "the V4 record with FNUZ values", "e4m3fnuz", "float8_e4m3fnuz", 224.0),
)

KV_FORMATS: MappingProxyType[str, KVFormat] = MappingProxyType({declared.name: declared for declared in _DECLARED})
"""Every declared kv_format by name."""


def get_kv_format(name: str | KVFormat) -> KVFormat:
    """The declared kv_format called `name`, or the record itself; ValueError lists the names where there is none."""
    found = name if isinstance(name, KVFormat) else KV_FORMATS.get(name)
    if found is None:
        raise UsageError(f"kv_format {name!r} is unknown; the kv_formats are {', '.join(KV_FORMATS)}")
    return found


if find_spec("torch") is not None:
    from mla_suite.kv_formats.cache import empty as empty
    from mla_suite.kv_formats.cache import pack as pack
    from mla_suite.kv_formats.cache import unpack as unpack
    from mla_suite.kv_formats.cache import validate as validate
