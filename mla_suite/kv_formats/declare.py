"""The definition of a KV format: its fields, byte offsets, scale rule and block stride, as one frozen record.

Nothing here needs torch, so a machine that only builds kernels can read the constants.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from dataclasses import dataclass
from math import gcd

ENCODING_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "e4m3fn": 8, "e4m3fnuz": 8, "e8m0": 8, "e2m1": 4, "pad": 8}
"""Element encodings a field may have, with the bits of one element.

Two `e2m1` values, of OCP's microscaling fp4, share a byte: the first is in the low half.

`e8m0` is a bare exponent: value 2^(byte - 127), byte 0 is 2^-127 and byte 255 is NaN, as the OCP microscaling
specification says. FlashMLA's kernels build the float by shifting the byte left by 23 bits, which reads 0 for
byte 0 and +inf for byte 255; no writer that follows `ScaleRule` stores either byte for finite values.
"""

FP8_LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}
"""The largest finite value of each fp8 flavour; encoders saturate to it, so no finite input becomes NaN."""

LEAST_POWER_OF_TWO = 2.0**-126
"""Of a scale that kernels write: powers are rounded up as normal numbers."""

ROW = ("latent", "rope")
"""Names of the fields that hold a row's values."""
FIELDS = (*ROW, "scale", "pad")
"""Names that fields have."""


@dataclass(frozen=True)
class Field:
    """One field of a token: `count` elements of `encoding`.

    In a block of `page_size` tokens, token `t` has the field at byte `page_size * per_block + t * stride + offset`.
    """

    name: str
    encoding: str
    count: int
    offset: int
    stride: int
    per_block: int = 0

    def __post_init__(self) -> None:
        if self.encoding not in ENCODING_BITS:
            raise ValueError(f"field {self.name}: encoding {self.encoding}; possible are {', '.join(ENCODING_BITS)}")
        if self.count * ENCODING_BITS[self.encoding] % 8:
            raise ValueError(f"field {self.name}: {self.count} values of {self.encoding} are not whole bytes")

    @property
    def bytes(self) -> int:
        """Bytes of the field in one token."""
        return self.count * ENCODING_BITS[self.encoding] // 8

    @property
    def aligned(self) -> bool:
        """Whether every token has the field at a multiple of its elements' bytes."""
        return gcd(self.offset, self.stride, self.per_block) % max(ENCODING_BITS[self.encoding] // 8, 1) == 0

    def start(self, token: int, page_size: int) -> int:
        """First byte of the field of `token` within its block of `page_size` tokens."""
        return page_size * self.per_block + token * self.stride + self.offset


@dataclass(frozen=True)
class ScaleRule:
    """How a writer derives the dequantisation scale of `tile` neighbouring values.

    s = max(amax / divisor, smallest), then rounded up to a power of two if `power_of_two`, then into the encoding of
    the scale field; a value is stored as round(value / s) and read as stored * s. A tile that holds NaN or inf gets
    scale NaN and reads back as NaN.
    """

    tile: int
    divisor: float
    smallest: float
    power_of_two: bool

    @property
    def sentence(self) -> str:
        """The rule in words, for tables."""
        rule = f"max(amax / {self.divisor:g}, {self.smallest:.3g})"
        rounding = f"2^ceil(log2({rule}))" if self.power_of_two else rule
        return f"{rounding} per {self.tile} values"


@dataclass(frozen=True)
class KVFormat:
    """A KV format: where each value of a token lies in a block of a paged cache, and how it is encoded.

    A cache is a tensor `[num_pages, page_size, width]` of `dtypes[0]` (any of `dtypes` is accepted); `width` counts
    elements of that dtype. The row a token stands for is its `latent` values followed by its `rope` values, `head_dim`
    in all; V is the first `head_dim_v` of them. ValueError says what could not be stored or read back: fields that
    leave bytes of a block to none or to two of them, scales of more values than a row has.
    """

    name: str
    summary: str
    fields: tuple[Field, ...]
    dtypes: tuple[str, ...]
    head_dim_v: int
    alignment: int
    scale_rule: ScaleRule | None = None
    per_tensor_descale: bool = False
    block_multiple: int = 1

    def __post_init__(self) -> None:
        if wrong := _names_wrong(self) or _sizes_wrong(self) or _places_wrong(self):
            raise ValueError(f"kv_format {self.name!r}: {wrong}")

    @functools.cached_property
    def by_name(self) -> dict[str, Field]:
        """Fields by their name."""
        return {field.name: field for field in self.fields}

    @property
    def value_fields(self) -> tuple[Field, ...]:
        """The fields whose values, concatenated, are the row."""
        return tuple(field for field in self.fields if field.name in ROW)

    @property
    def latent(self) -> int:
        """Values of the un-rotated part (kv_lora_rank; V4 calls its 448 of them nope)."""
        return self.by_name["latent"].count

    @property
    def rope(self) -> int:
        """Values of the rotated part."""
        return self.by_name["rope"].count if "rope" in self.by_name else 0

    @property
    def head_dim(self) -> int:
        """Values of one row."""
        return self.latent + self.rope

    @functools.cached_property
    def scaled(self) -> int:
        """Values of a row, from its first on, that scales multiply; the others are stored as they are."""
        return 0 if self.scale_rule is None else self.by_name["scale"].count * self.scale_rule.tile

    @property
    def rounds_rotated(self) -> bool:
        """Whether values that are rotated before they are stored are rounded to the type of the rows in between.

        It is so where scales multiply rope values too, as in V4.1's records: the CUDA writers of vLLM and SGLang choose
        scales by such values. They multiply and add in one rounding there.
        """
        return self.scaled > self.latent

    @property
    def token_bytes(self) -> int:
        """Bytes one token costs, padding of the record included and of the block not."""
        return sum(field.bytes for field in self.fields)

    @functools.cached_property
    def element_bytes(self) -> int:
        """Bytes of one element of the cache tensor."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}.get(self.dtypes[0], 1)

    @property
    def width(self) -> int:
        """Last dimension of the cache tensor."""
        return self.token_bytes // self.element_bytes

    @functools.cached_property
    def dense(self) -> bool:
        """Whether a token is nothing but its row in one encoding of whole bytes, so that any head_dim fits."""
        alone = self.fields == self.value_fields and len(self.encodings) == 1
        return alone and all(ENCODING_BITS[encoding] >= 8 for encoding in self.encodings)

    @functools.cached_property
    def seamless(self) -> bool:
        """Whether a row's bytes do not depend on where it is divided into latent and rope.

        So it is where a row is one run of values in one encoding, all or none of them scaled.
        """
        first = self.by_name["latent"]
        run = row_fields(first.encoding, self.latent, self.rope, first.stride)
        return self.value_fields == run and self.scaled in (0, self.head_dim)

    @functools.cached_property
    def encodings(self) -> frozenset[str]:
        """Encodings of the fields, which a kernel that reads or writes records must know."""
        return frozenset(field.encoding for field in self.fields)

    @property
    def flavour(self) -> str:
        """`ocp` or `fnuz` for fp8 values, else an empty string."""
        return {"e4m3fn": "ocp", "e4m3fnuz": "fnuz"}.get(self.by_name["latent"].encoding, "")

    def block_bytes(self, page_size: int, padded: bool = True) -> int:
        """Bytes from one block of `page_size` tokens to the next; `padded` rounds up to `block_multiple`."""
        multiple = self.block_multiple if padded else 1
        return -(-page_size * self.token_bytes // multiple) * multiple

    def sized(self, latent: int, rope: int) -> KVFormat:
        """The same format for rows of `latent` + `rope` values.

        Dense formats take rows of any size, other seamless ones divide their own row anywhere, the rest have no choice.
        """
        if (latent, rope) == (self.latent, self.rope):
            return self
        if self.dense:
            return _dense_sized(self, latent, rope)
        if self.seamless and 0 < latent <= self.head_dim == latent + rope:
            return _divided(self, latent, rope)
        raise ValueError(
            f"kv_format {self.name!r} holds {self.latent} latent and {self.rope} rope values, not {latent} and "
            f"{rope}; rows of any size need bf16, fp16, fp32, fp8 or fp8_fnuz"
        )

    def constants(self) -> dict[str, int]:
        """Integers a kernel needs, ready for -D macros.

        `KV_<FIELD>_{COUNT,OFFSET,STRIDE,PER_BLOCK}` place each field as `Field` says; `KV_SCALE_SMALLEST_BITS` is the
        fp32 bit pattern of the rule's smallest scale; the rest describe the record.
        """
        named = {
            "KV_TOKEN_BYTES": self.token_bytes,
            "KV_HEAD_DIM": self.head_dim,
            "KV_BLOCK_MULTIPLE": self.block_multiple,
            "KV_ALIGNMENT": self.alignment,
            "KV_FP8_FNUZ": int(self.flavour == "fnuz"),
        }
        if self.scale_rule is not None:
            named["KV_SCALE_TILE"] = self.scale_rule.tile
            named["KV_SCALE_DIVISOR"] = int(self.scale_rule.divisor)
            named["KV_SCALE_SMALLEST_BITS"] = struct.unpack("<I", struct.pack("<f", self.scale_rule.smallest))[0]
            named["KV_SCALE_POWER_OF_TWO"] = int(self.scale_rule.power_of_two)
        for field in self.fields:
            prefix = f"KV_{field.name.upper()}_"
            named[prefix + "COUNT"] = field.count
            named[prefix + "OFFSET"] = field.offset
            named[prefix + "STRIDE"] = field.stride
            named[prefix + "PER_BLOCK"] = field.per_block
        return named


def _names_wrong(fmt: KVFormat) -> str:
    """What is wrong with a format's fields as they are named; empty where nothing is, as of the next two."""
    names = [field.name for field in fmt.fields]
    if "latent" not in names or len(set(names)) < len(names) or not set(names) <= set(FIELDS):
        return f"its fields are {', '.join(names)}; it has latent, and at most one of each other of {', '.join(FIELDS)}"
    if ("scale" in names) != (fmt.scale_rule is not None):
        return "it has a scale field or a scale_rule alone; declare both or neither"
    return ""


def _sizes_wrong(fmt: KVFormat) -> str:
    if not 1 <= fmt.head_dim_v <= fmt.head_dim:
        return f"head_dim_v is {fmt.head_dim_v}; V is 1 to all {fmt.head_dim} values of a row"
    if not fmt.dtypes or fmt.token_bytes % fmt.element_bytes:
        return f"tokens of {fmt.token_bytes} bytes are no whole elements of {fmt.dtypes}"
    if fmt.scale_rule is not None and not 1 <= fmt.scaled <= fmt.head_dim:
        scales, tile = fmt.by_name["scale"].count, fmt.scale_rule.tile
        return f"{scales} scales of {tile} values each are not those of a row of {fmt.head_dim}"
    return ""


def _places_wrong(fmt: KVFormat) -> str:
    for page_size in (1, 2, 3):
        spans = [
            (field.start(token, page_size), field.bytes, field.name)
            for token in range(page_size)
            for field in fmt.fields
        ]
        end = 0
        for start, size, name in sorted(spans):
            if start != end:
                fields = "no field" if start > end else f"{name} and in another field"
                return f"byte {min(start, end)} of a block of {page_size} token{'s' * (page_size > 1)} is in {fields}"
            end += size
    return ""


@functools.lru_cache(maxsize=256)
def _dense_sized(kv_format: KVFormat, latent: int, rope: int) -> KVFormat:
    if latent < 1 or rope < 0:
        raise ValueError(
            f"kv_format {kv_format.name!r}: {latent} latent and {rope} rope values; needs at least 1 and 0"
        )
    encoding = kv_format.fields[0].encoding
    return dataclasses.replace(
        kv_format, fields=dense_fields(encoding, latent, rope), head_dim_v=min(kv_format.head_dim_v, latent + rope)
    )


@functools.lru_cache(maxsize=256)
def _divided(kv_format: KVFormat, latent: int, rope: int) -> KVFormat:
    whole = kv_format.by_name["latent"]
    parts = row_fields(whole.encoding, latent, rope, whole.stride)
    return dataclasses.replace(kv_format, fields=(*parts, *(f for f in kv_format.fields if f.name not in ROW)))


def row_fields(encoding: str, latent: int, rope: int, stride: int) -> tuple[Field, ...]:
    """Fields of a row that begins its token and is one run of values in one encoding."""
    first = Field("latent", encoding, latent, 0, stride)
    return (first, Field("rope", encoding, rope, first.bytes, stride)) if rope else (first,)


def dense_fields(encoding: str, latent: int, rope: int) -> tuple[Field, ...]:
    """Fields of a token that is its row and nothing else."""
    return row_fields(encoding, latent, rope, (latent + rope) * ENCODING_BITS[encoding] // 8)
