"""KV formats that nobody ships: what a user may declare, for tests of what kernels refuse of it and store of it."""

from mla_suite.kv_formats import Field, KVFormat, ScaleRule
from mla_suite.kv_formats.declare import ENCODING_BITS


def made(latent="e4m3fn", count=512, *, scale="fp32", tile=128, rope="bf16", ropes=64, tiles=None, pad=0, **rule):
    """A record: its row, and at the end of the block its scales and `pad` bytes.

    tiles  scales of a token; all latents have one where it is not given
    rope   the encoding of `ropes` rope values, or None
    rule   what differs in the ScaleRule
    """
    row = [("latent", latent, count)] + [("rope", rope, ropes)] * (rope is not None)
    behind = [("scale", scale, count // tile if tiles is None else tiles)] + [("pad", "pad", pad)] * (pad > 0)
    size = bytes_of(row)
    fields = (*placed(row, 0), *placed(behind, size))
    given = dict(divisor=448.0, smallest=2.0**-20, power_of_two=False) | rule
    name = "_".join(("made", latent, *(f"{value}" for value in (count, scale, tile, rope, pad))))
    scale_rule = ScaleRule(tile=tile, **given)
    return KVFormat(name, "", fields, ("uint8",), min(count, 512), 16, scale_rule=scale_rule, block_multiple=16)


def bytes_of(parts):
    return sum(number * ENCODING_BITS[encoding] // 8 for _, encoding, number in parts)


def placed(parts, per_block):
    """Fields, one behind the other."""
    stride = bytes_of(parts)
    return [
        Field(name, encoding, number, bytes_of(parts[:i]), stride, per_block)
        for i, (name, encoding, number) in enumerate(parts)
    ]
