"""sparse_decode on gfx950 around its numbers: which kernel, what is refused, what a call and a key cost."""

from __future__ import annotations

import os

import pytest
import torch
from backend_calls import BackendCalls
from decode_grid import assert_within_bound
from sparse_problems import GFX950, MODES, POOLS, attend, exact, in_mode, problem
from torch.utils._python_dispatch import TorchDispatchMode

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs.gfx950.sparse_decode import BLOCK_MS, RECORDS, SparseConfig, record_of, tile_rows
from mla_suite.build import compilers, manifest
from mla_suite.core.dispatch import Unsupported
from mla_suite.kv_formats import kv_format
from mla_suite.launch import has_kernel
from mla_suite.ops.sparse_decode import SPARSE_DECODE

NATIVE = BackendCalls(SPARSE_DECODE, "native")


@pytest.fixture(autouse=True)
def gfx950():
    config = SparseConfig(GFX950, "dsv4", 16)
    if not has_kernel("gfx950", config.instance):
        pytest.skip(f"{config.instance} is not built for gfx950; run `python -m mla_suite build --arch gfx950`")
    with mla_suite.emulate("gfx950") as record:
        yield record


class Recorded(TorchDispatchMode):
    """Names of the aten operators called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


VIEWS = {"view", "_unsafe_view", "select", "slice", "as_strided", "alias", "detach", "reshape", "unsqueeze"}


@pytest.mark.parametrize("mode", MODES)
def test_the_host_reads_and_allocates_nothing(mode):
    """A second call launches, and beside that only takes views: no length is read, no scratch made, no variable set."""
    args, kwargs = problem(POOLS["v4"], 2, 16)
    in_mode(mode, args, kwargs, seed=1)
    out, lse = attend(args, kwargs)
    environment = dict(os.environ)
    answer = NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), GFX950)
    with Recorded() as recorded:
        NATIVE.run(answer.config, (out, lse), *args, **kwargs)
    assert set(recorded.names) <= VIEWS, recorded.names
    added = set(os.environ) - set(environment)
    assert all(name.startswith("TORCHINDUCTOR") for name in added), "torch sets its own when a dispatch mode is entered"
    assert all(os.environ[name] == value for name, value in environment.items())


def test_partials_are_fp32():
    args, kwargs = problem(POOLS["v4"], 1, 16)
    with emulator.configured(collect=True) as reports:
        attend(args, kwargs | {"num_splits": 2})
    sparse, _ = reports
    assert sparse.stored["partial_out"] == 2 * 16 * 512 * 4
    assert sparse.stored["partial_lse"] == 2 * 16 * 4


@pytest.mark.parametrize("arch", ["gfx942", None])
def test_other_archs_never_get_these_kernels(arch):
    args, kwargs = problem(POOLS["v4"], 2, 16)
    answer = NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), archs.get(arch) if arch else None)
    assert isinstance(answer, Unsupported)
    assert (f"{arch} has no native kernel of sparse_decode" if arch else "gfx950") in answer.reason


def test_gfx942_falls_back_to_equal_numbers():
    args, kwargs = problem(POOLS["v4"], 2, 16)
    out, lse = attend(args, kwargs)
    with mla_suite.emulate("gfx942"):
        other, other_lse = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    expected = exact(*args, **kwargs)
    assert_within_bound(out, lse, expected)
    assert_within_bound(other, other_lse, expected)
    for key in manifest.installed().kernels:
        assert key[0] in ("gfx950", "sm_90") or not key[1].startswith("sparse_decode")


REFUSED = {
    "five pools": (lambda: problem([("dsv4", 1, 16, 3)] * 5, 1, 8), "5 pools; it takes 1 to 4"),
    "mixed records": (lambda: problem([("dsv4", 1, 16, 3), ("bf16", 1, 16, 3)], 1, 8), "pools in dsv4, bf16"),
    "odd pages": (lambda: problem([("dsv4", 2, 3, 3)], 1, 8, padded=False), "aligned to 8 bytes"),
    "fp16": (lambda: _with_q(lambda q: q.half()), "q is torch.float16; it takes bfloat16"),
}


def _with_q(change):
    args, kwargs = problem(POOLS["v4"], 1, 8)
    return [change(args[0]), *args[1:]], kwargs


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_is_computed_elsewhere(why):
    make, sentence = REFUSED[why]
    args, kwargs = make()
    answer = NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), GFX950)
    assert isinstance(answer, Unsupported)
    assert sentence in answer.reason
    out, lse = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    assert_within_bound(out, lse, exact(*args, **kwargs))


def counted(name, heads, keys):
    """The report of one workgroup that attends to `keys` keys, all valid, most of them more than once."""
    if manifest.installed().find("gfx950", SparseConfig(GFX950, "dsv4", 16).instance).compiler != (
        compilers.packaged().version
    ):
        pytest.skip(f"the counts are those of {compilers.packaged().version}")
    args, kwargs = problem([(name, 8, 64, keys)], 1, heads, invalid=0, spread=0)
    with emulator.configured(collect=True) as reports:
        attend(args, kwargs | {"num_splits": 1})
    (report,) = reports
    assert not report.findings
    return report


COUNTS = [
    ("dsv4", 16, 584, 27, 29),
    ("dsv4", 64, 584, 49, 42),
    ("dsv4", 128, 584, 75, 62),
    ("v32", 128, 672, 84, 67),
]


@pytest.mark.parametrize(("name", "heads", "bytes_per_key", "instructions", "lds"), COUNTS)
def test_counters(name, heads, bytes_per_key, instructions, lds):
    """Per key and workgroup: bytes read once, matrix FLOP exact, dequantised once, bound by memory or matrix."""
    keys = 2048
    report = counted(name, heads, keys)
    mix = report.mix()
    kind = kv_format(name)
    assert report.loaded["cache_0"] == keys * bytes_per_key
    assert report.loaded["indices_0"] == keys * 4
    rescored = 1.05  # a tile whose scores exceed the reference is scored twice
    exact_matrix = keys * heads * 2 * (kind.head_dim + 512) // (2 * 16 * 16 * 32)
    assert exact_matrix <= mix["v_mfma_f32_16x16x32_bf16"] <= exact_matrix * rescored
    converted = sum(times for op, times in mix.items() if "fp8" in op)
    # A load of 16 bytes per lane covers 128 bytes of eight tokens, so 448 values convert as 512.
    assert converted == keys * 512 // 2 // 64
    assert report.instructions() <= instructions * keys
    assert report.lds_clocks() <= lds * keys
    bound = report.bound(GFX950)
    assert bound.limiter in ("memory", "matrix")
    budget = getattr(bound, bound.limiter)
    dequantising = converted * (1 if name == "dsv4" else 3) + keys * 5 // 8 * 2
    assert dequantising * 4 / GFX950.simds <= 0.25 * budget


def test_rows_of_a_workgroup_hold_all_heads():
    for heads in range(1, 400):
        rows = tile_rows(heads)
        tiles = -(-heads // 128)
        assert rows * tiles >= heads
        assert rows * tiles - heads < 32 * tiles


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rows": 24}, "rows are one of"),
        ({"record": "dsv5"}, "records are"),
        ({"arch": archs.get("gfx942")}, "gfx942 has no such kernels"),
    ],
)
def test_an_illegal_config_says_why(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        SparseConfig(**({"arch": GFX950, "record": "dsv4", "rows": 16} | changed))


def test_a_config_prints_its_point_alone():
    assert str(SparseConfig(GFX950, "dsv4", 16)) == "SparseConfig(record='dsv4', rows=16)"


def test_every_declared_kernel_is_one_of_the_rules():
    built = manifest.installed().kernels
    names = {name for arch, name in built if arch == "gfx950" and name.startswith("sparse_decode_")}
    assert names == {SparseConfig(GFX950, record, rows).instance for record in RECORDS.values() for rows in BLOCK_MS}


def test_records_of_mixed_kv_formats():
    assert record_of(["v32", "v32_pow2"], 576) == "v32"
    assert record_of(["dsv4", "bf16"], 512) is None
    assert record_of(["dsv4_fnuz"], 512) is None
