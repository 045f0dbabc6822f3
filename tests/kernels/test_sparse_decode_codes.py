"""Every code of sparse_decode's records on AMD's archs: the value that reaches PV is exact, and a NaN is seen.

A query token that selects one key has a softmax weight of 1, so its output is the key's value as it was multiplied.
"""

from __future__ import annotations

import pytest
import torch
from built import emulated
from decode_grid import assert_nan_in
from sparse_problems import CONFIGS, attend, require_kernels

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.kv_formats.encode import decode

MIN_NORMAL = 2.0**-126
E8M0 = (0, 1, 60, 126, 127, 128, 200, 246, 254)
FP32 = (2.0**-127, 2.0**-126, 1e-30, 0.3, 1.0, 1.7, 3.3e9, 2.0**118, 2.0**127)
E4M3 = (0, 1, 7, 8, 0x38, 0x3F, 0x52, 0x7E, 0x80, 0x81, 0xB9, 0xFE)
SCALES = {
    **{"dsv4": E8M0, "dsv4_fnuz": E8M0, "v32": FP32, "v32_pow2": (2.0**-127, 2.0**-60, 0.5, 1.0, 2.0**118, 2.0**127)},
    **{"v32_nope": FP32, "v41": E8M0, "v41_fp4": E4M3},
}
CASES = [
    (arch, name) for arch, config in CONFIGS.items() for name in SCALES if name in {kind for kind, _ in config.records}
]
EACH = pytest.mark.parametrize(("arch", "name"), CASES, indirect=["arch"])


arch = emulated(require_kernels, autouse=True)


def scaled_alone(name):
    """The kv_format with all values that scales multiply in its latent field."""
    kind = get_kv_format(name)
    return kind.sized(kind.head_dim, 0) if kind.seamless else kind


def stored_scales(encoding, scales):
    """Bytes of scales: of fp32 ones by their value, of others by their code."""
    return torch.tensor(scales, dtype=torch.float32 if encoding == "fp32" else torch.uint8).view(torch.uint8)


def one_key_each(name, records):
    """Calls with query token i on the key whose latent codes and scales are records[i]; returns its outputs in fp32.

    A single scale stands for all.
    """
    kind = scaled_alone(name)
    page = len(records)
    cache = caches.empty(kind, 1, page)
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    raw.zero_()
    codes, scale = kind.by_name["latent"], kind.by_name["scale"]
    for token, (latent, scales) in enumerate(records):
        stored = latent if codes.encoding != "e2m1" else latent[::2] | latent[1::2] << 4
        raw[codes.start(token, page) :][: codes.bytes] = stored
        raw[scale.start(token, page) :][: scale.bytes] = stored_scales(
            scale.encoding, scales * (scale.count // len(scales))
        )
    q = torch.zeros(page, 16, kind.head_dim).bfloat16()
    index = torch.arange(page, dtype=torch.int32)[:, None]
    args = [q, [cache], [index], [None], [None], None, None]
    out, lse = attend(args, {"kv_formats": [name], "softmax_scale": 1.0})
    exact = caches.gather(kind, cache, torch.arange(page))[:, : codes.count]
    return out[:, :, : codes.count].float(), lse, exact


@EACH
def test_every_finite_code_is_exact(arch, name):
    fields = scaled_alone(name).by_name
    count, encoding = fields["latent"].count, fields["latent"].encoding
    every = torch.arange(16 if encoding == "e2m1" else 256, dtype=torch.uint8)
    values = decode(every, encoding).flatten()[:: 2 if encoding == "e2m1" else 1]  # of two in a byte the first
    records, seen = [], set()
    for scale in SCALES[name]:
        factor = decode(stored_scales(fields["scale"].encoding, [scale]), fields["scale"].encoding).double()
        possible = every[(values.double() * factor).abs() < 3.3e38]
        for shift in (0, 1, 97):  # each code in several places of a word
            records.append((possible[(torch.arange(count) + shift) % len(possible)], [scale]))
        seen |= set(possible.tolist())
    assert len(seen) == len(every) - int(values.isnan().sum())
    out, lse, exact = one_key_each(name, records)
    rounded = exact.bfloat16().float()
    assert exact.isfinite().all()
    assert torch.equal(lse, torch.zeros_like(lse))
    normal = (exact.abs() >= MIN_NORMAL) | (exact == 0)
    for head in (0, 15):
        differs = normal & (out[:, head] != rounded)
        assert not bool(differs.any()), (name, [records[i][1] for i in differs.any(dim=1).nonzero().flatten()])


ONE = {"e8m0": 127, "fp32": 1.0, "e4m3fn": 0x38, "e4m3fnuz": 0x40, "e2m1": 2}
"""Codes of 1, and of an fp32 value itself."""
NAN = {"e8m0": (255,), "fp32": (float("nan"),), "e4m3fn": (0x7F, 0xFF), "e4m3fnuz": (0x80,), "e2m1": ()}


@EACH
def test_every_scale_multiplies_its_own_values(arch, name):
    fields = scaled_alone(name).by_name
    scale, ones = fields["scale"], torch.full((fields["latent"].count,), ONE[fields["latent"].encoding]).byte()
    rising = {"e8m0": list(range(100, 132)), "fp32": [2.0**i for i in range(32)], "e4m3fn": list(range(8, 104, 3))}
    out, _, exact = one_key_each(name, [(ones, rising[scale.encoding][: scale.count])])
    assert len(exact.unique()) == scale.count
    assert torch.equal(out[0], exact.expand(16, -1))


@EACH
def test_every_nan_is_seen(arch, name):
    """Each NaN code alone in a record, at the beginning, in the middle and at the end, and each scale that is NaN."""
    fields = scaled_alone(name).by_name
    (encoding, count), scale = (fields["latent"].encoding, fields["latent"].count), fields["scale"]
    ones, one = torch.full((count,), ONE[encoding]).byte(), [ONE[scale.encoding]] * scale.count
    records = [(ones, one)]
    for code in NAN[encoding]:
        for at in (0, 1, 2, 3, 17, count - 1):
            latent = ones.clone()
            latent[at] = code
            records.append((latent, one))
    for code in NAN[scale.encoding]:
        records += [(ones, [*one[:at], code, *one[at + 1 :]]) for at in range(scale.count)]
    out, lse, _ = one_key_each(name, records)
    assert_nan_in(slice(1, None), out, lse)
