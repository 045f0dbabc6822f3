"""Every fp8 code of sparse_decode's records on AMD's archs: the value that reaches PV is exact, and a NaN is seen.

A query token that selects one key has a softmax weight of 1, so its output is the key's value as it was multiplied.
"""

from __future__ import annotations

import pytest
import torch
from sparse_problems import CONFIGS, attend, require_kernels

import mla_suite
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

MIN_NORMAL = 2.0**-126
E8M0 = (0, 1, 60, 126, 127, 128, 200, 246, 254)
FP32 = (2.0**-127, 2.0**-126, 1e-30, 0.3, 1.0, 1.7, 3.3e9, 2.0**118, 2.0**127)
SCALES = {"dsv4": E8M0, "dsv4_fnuz": E8M0, "v32": FP32, "v32_pow2": (2.0**-127, 2.0**-60, 0.5, 1.0, 2.0**118, 2.0**127)}
CASES = [
    (arch, name) for arch, config in CONFIGS.items() for name in SCALES if name in {kind for kind, _ in config.records}
]


@pytest.fixture(autouse=True)
def emulated(arch):
    require_kernels(arch)
    with mla_suite.emulate(arch):
        yield


def one_key_each(name, records):
    """Calls with query token i on the key whose latent codes and scale are records[i]; returns its outputs in fp32."""
    kind = get_kv_format(name)
    page = len(records)
    cache = caches.empty(kind, 1, page)
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    raw.zero_()
    codes, scale = kind.by_name["latent"], kind.by_name["scale"]
    for token, (latent, factor) in enumerate(records):
        raw[codes.start(token, page) :][: codes.count] = latent
        stored = torch.full((scale.count,), factor, dtype=torch.uint8 if scale.encoding == "e8m0" else torch.float32)
        raw[scale.start(token, page) :][: scale.bytes] = stored.view(torch.uint8)
    q = torch.zeros(page, 16, kind.head_dim).bfloat16()
    index = torch.arange(page, dtype=torch.int32)[:, None]
    args = [q, [cache], [index], [None], [None], None, None]
    out, lse = attend(args, {"kv_formats": [name], "softmax_scale": 1.0})
    exact = caches.gather(kind, cache, torch.arange(page))[:, : codes.count]
    return out[:, :, : codes.count].float(), lse, exact


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_every_finite_code_is_exact(arch, name):
    count = get_kv_format(name).by_name["latent"].count
    every = torch.arange(256, dtype=torch.uint8)
    fnuz = name.endswith("fnuz")
    values = every.view(torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn).float()
    records, seen = [], set()
    for scale in SCALES[name]:
        factor = 2.0 ** (scale - 127) if name.startswith("dsv4") else scale
        possible = every[(values.double() * factor).abs() < 3.3e38]
        for shift in (0, 1, 97):  # each code in several places of a word
            records.append((possible[(torch.arange(count) + shift) % len(possible)], scale))
        seen |= set(possible.tolist())
    assert len(seen) == 256 - int(values.isnan().sum())
    out, lse, exact = one_key_each(name, records)
    rounded = exact.bfloat16().float()
    assert exact.isfinite().all()
    assert torch.equal(lse, torch.zeros_like(lse))
    normal = (exact.abs() >= MIN_NORMAL) | (exact == 0)
    for head in (0, 15):
        differs = normal & (out[:, head] != rounded)
        assert not bool(differs.any()), (name, [records[i][1] for i in differs.any(dim=1).nonzero().flatten()])


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_every_nan_is_seen(arch, name):
    """Each NaN code alone in a record, at the beginning, in the middle and at the end, and a scale that is NaN."""
    count = get_kv_format(name).by_name["latent"].count
    nan_codes, nan_scale, one = ((0x80,), 255, 127) if name == "dsv4_fnuz" else ((0x7F, 0xFF), 255, 127)
    if not name.startswith("dsv4"):
        nan_scale, one = float("nan"), 1.0
    records = [(torch.full((count,), 0x38, dtype=torch.uint8), one)]
    for code in nan_codes:
        for at in (0, 1, 2, 3, 17, count - 1):
            latent = torch.full((count,), 0x38, dtype=torch.uint8)
            latent[at] = code
            records.append((latent, one))
    records.append((torch.full((count,), 0x38, dtype=torch.uint8), nan_scale))
    out, lse, _ = one_key_each(name, records)
    assert bool(out[0].isfinite().all() and lse[0].isfinite().all())
    assert bool(out[1:].isnan().all())
    assert bool(lse[1:].isnan().all())
