"""sparse_decode on AMD's archs around its numbers: which kernel, what is refused, what a call and a key cost."""

from __future__ import annotations

import os

import pytest
import torch
from backend_calls import BackendCalls, assert_refused
from built import emulated
from decode_grid import assert_within_bound, counted_by_packaged_compiler
from observers import Operators
from sparse_problems import CONFIGS, MODES, POOLS, attend, exact, in_mode, problem, require_kernels

from mla_suite import archs, emulator
from mla_suite.build.instances import instances
from mla_suite.core.dispatch import Unsupported
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.sparse_decode import SPARSE_DECODE

NATIVE = BackendCalls(SPARSE_DECODE, "native")


arch = emulated(require_kernels, autouse=True, record=True)


VIEWS = {"view", "_unsafe_view", "select", "slice", "as_strided", "alias", "detach", "reshape", "unsqueeze"}


@pytest.mark.parametrize("mode", MODES)
def test_the_host_reads_and_allocates_nothing(arch, mode):
    """A second call launches, and beside that only takes views: no length is read, no scratch made, no variable set."""
    args, kwargs = problem(POOLS["v4"], 2, 16)
    in_mode(mode, args, kwargs, seed=1)
    out, lse = attend(args, kwargs)
    environment = dict(os.environ)
    answer = NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), arch)
    with Operators() as ran:
        NATIVE.run(answer.config, (out, lse), *args, **kwargs)
    names = {func.overloadpacket.__name__ for func in ran.seen}
    assert names <= VIEWS, names
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


def test_a_machine_without_the_arch_never_gets_these_kernels(arch):
    args, kwargs = problem(POOLS["v4"], 2, 16)
    assert_refused(NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), None), arch.name)


def test_fnuz_records_are_native_where_the_arch_converts_them(arch):
    args, kwargs = problem([("dsv4_fnuz", 2, 64, 70)], 2, 16)
    answer = NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), arch)
    assert isinstance(answer, Unsupported) == (arch.fp8 == "ocp")
    out, lse = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    assert_within_bound(out, lse, exact(*args, **kwargs))


@pytest.mark.parametrize(
    ("names", "options", "sentence"),
    [
        (["dsv4"] * 5, {}, "5 pools; it takes 1 to 4"),
        (["dsv4", "bf16"], {}, "pools in dsv4, bf16 with rows of 512 values; it takes dsv4"),
        (["v41", "dsv4"], {}, "pools in v41, dsv4 with rows of 512 values; it takes dsv4"),
        (["dsv4", "dsv4_fnuz"], {}, "pools in dsv4, dsv4_fnuz with rows of 512 values; it takes dsv4"),
        (["v32", "bf16"], {}, "pools in v32, bf16 with rows of 576 values; it takes dsv4"),
        (["fp16"], {}, "pools in fp16 with rows of 576 values; it takes dsv4"),
        (["dsv4"], {"page": 3, "padded": False}, "aligned to 8 bytes"),
        (["dsv4"], {"dtype": torch.float16}, "q is torch.float16; it takes bfloat16"),
    ],
)
def test_what_is_refused_is_computed_elsewhere(arch, names, options, sentence):
    pools = [(name, 2, options.get("page", 16), 3) for name in names]
    args, kwargs = problem(pools, 1, 8, padded=options.get("padded", True), dtype=options.get("dtype", torch.bfloat16))
    assert_refused(NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), arch), sentence)
    out, lse = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    exact_keys = "fp16" in names  # has more digits than bf16
    assert_within_bound(out, lse, exact(*args, **kwargs, rounded=not exact_keys))


def counted(arch, name, heads, keys):
    """The report of one workgroup that attends to `keys` keys, all valid, most of them more than once."""
    counted_by_packaged_compiler(arch.name, CONFIGS[arch.name](arch, "dsv4", 16).instance)
    args, kwargs = problem([(name, 8, 64, keys)], 1, heads, invalid=0, spread=0)
    with emulator.configured(collect=True) as reports:
        attend(args, kwargs | {"num_splits": 1})
    (report,) = reports
    assert not report.findings
    return report


MFMA = {"gfx942": ("v_mfma_f32_16x16x16_bf16", 16), "gfx950": ("v_mfma_f32_16x16x32_bf16", 32)}
"""The matrix instruction, and how many values of a row it contracts."""
DEQUANTISING = {
    "gfx942": {"dsv4": 7, "dsv4_fnuz": 3, "v32": 11, "v41": 7, "v41_fp4": 6, "fp8_fnuz": 2},
    "gfx950": {"dsv4": 1, "v32": 3, "v32_nope": 3, "v41": 1, "v41_fp4": 3, "fp8": 1},
}
"""Vector instructions of two values."""
COUNTS = [
    ("gfx942", "dsv4", 16, 584, 66, 29, "memory"),
    ("gfx942", "dsv4", 32, 584, 73, 39, "memory"),
    ("gfx942", "dsv4", 64, 584, 92, 42, "memory"),
    ("gfx942", "dsv4_fnuz", 16, 584, 49, 29, "memory"),
    ("gfx942", "dsv4_fnuz", 64, 584, 76, 42, "memory"),
    ("gfx942", "v32", 64, 672, 108, 45, "memory"),
    ("gfx942", "v41", 16, 528, 66, 29, "memory"),
    ("gfx942", "v41", 64, 528, 88, 42, "memory"),
    ("gfx942", "v41_fp4", 16, 288, 75, 29, "valu"),
    ("gfx942", "v41_fp4", 64, 288, 93, 42, "matrix"),
    ("gfx942", "fp8_fnuz", 16, 576, 43, 31, "memory"),
    ("gfx942", "fp8_fnuz", 64, 576, 66, 45, "memory"),
    ("gfx950", "dsv4", 16, 584, 27, 29, "memory"),
    ("gfx950", "dsv4", 64, 584, 49, 42, "memory"),
    ("gfx950", "dsv4", 128, 584, 75, 62, "matrix"),
    ("gfx950", "v32", 128, 672, 84, 67, "matrix"),
    ("gfx950", "v32_nope", 128, 544, 81, 62, "matrix"),
    ("gfx950", "v41", 16, 528, 25, 29, "memory"),
    ("gfx950", "v41", 128, 528, 73, 62, "matrix"),
    ("gfx950", "v41_fp4", 16, 288, 44, 29, "lds"),
    ("gfx950", "v41_fp4", 128, 288, 92, 62, "matrix"),
    ("gfx950", "fp8", 16, 576, 24, 31, "memory"),
    ("gfx950", "fp8", 128, 576, 69, 67, "matrix"),
]


@pytest.mark.parametrize(
    ("arch", "name", "heads", "bytes_per_key", "instructions", "lds", "limiter"), COUNTS, indirect=["arch"]
)
def test_counters(arch, name, heads, bytes_per_key, instructions, lds, limiter):
    """Per key and workgroup: bytes read once, matrix FLOP exact, dequantised once, and what bounds it."""
    keys = 2048
    report = counted(arch, name, heads, keys)
    mix = report.mix()
    kind = get_kv_format(name)
    assert report.loaded["cache_0"] == keys * bytes_per_key
    assert report.loaded["indices_0"] == keys * 4
    rescored = 1.05  # a tile whose scores exceed the reference is scored twice
    mfma, contracted = MFMA[arch.name]
    exact_matrix = keys * heads * 2 * (kind.head_dim + 512) // (2 * 16 * 16 * contracted)
    assert exact_matrix <= mix[mfma] <= exact_matrix * rescored
    converted = sum(times for op, times in mix.items() if "_pk_" in op and ("fp8" in op or "fp4" in op))
    # A load of 16 bytes per lane covers 128 bytes of eight tokens, so 448 values convert as 512. gfx942 converts beside
    # products without a branch, and so behind the last tile of 32 keys what the registers still hold. Of bare rows all
    # values convert, of records none of the rope part.
    values = kind.head_dim if kind.per_tensor_descale else 512
    assert converted == (keys + (32 if arch.name == "gfx942" else 0)) * values // 2 // 64
    assert report.instructions() <= instructions * keys
    assert report.lds_clocks() <= lds * keys
    bound = report.bound(arch)
    assert bound.limiter == limiter
    budget = bound.lds_128 if limiter == "lds" else getattr(bound, limiter)
    dequantising = converted * DEQUANTISING[arch.name][name] + keys * 5 // 8 * 2
    share = 0.55 if arch.name == "gfx942" or bytes_per_key == 288 else 0.25
    assert dequantising * 4 / arch.simds <= share * budget


def test_rows_of_a_workgroup_hold_all_heads(arch):
    config = CONFIGS[arch.name]
    most = config.block_ms[-1]
    for heads in range(1, 400):
        tiles = -(-heads // most)
        for record in config.records.values():
            rows = config.tile_rows(record, heads)
            assert rows * tiles >= heads
            assert rows * tiles - heads < (48 if len(config.rows_of(record)) == 2 else 32) * tiles


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rows": 24}, "rows are one of"),
        ({"record": "dsv5"}, "records are"),
        ({"arch": archs.get("sm_90")}, "sm_90 has no such kernels"),
    ],
)
def test_an_illegal_config_says_why(arch, changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        CONFIGS[arch.name](**({"arch": arch, "record": "dsv4", "rows": 16} | changed))


def test_every_declared_kernel_is_one_of_the_rules(arch):
    config = CONFIGS[arch.name]
    declared = {item.id for item in instances(arch.name) if item.kernel == "sparse_decode"}
    assert declared == {
        config(arch, record, rows).instance for record in config.records.values() for rows in config.rows_of(record)
    }
