"""combine's machine code for gfx942 and gfx950, executed in the emulator with every check on, against fp64."""

from __future__ import annotations

from types import SimpleNamespace

import merge_runs
import pytest
import torch
from backend_calls import BackendCalls
from built import assembly, emulated, require_built
from hostile_inputs import in_turn
from merges import (
    HEADS,
    INF,
    NAN,
    SPLITS,
    TOKENS,
    a_row_by_eight_waves,
    assert_rounded,
    cover,
    exact,
    four_rows,
    hard_to_round,
    partials,
)

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import CSRC
from mla_suite.archs import combine as config
from mla_suite.archs import combine as kernels
from mla_suite.archs.combine import CombineConfig
from mla_suite.core import dispatch
from mla_suite.launch import launcher, run
from mla_suite.launch.driver import LaunchError
from mla_suite.launch.spec import CallSpec, Input
from mla_suite.ops.combine import COMBINE
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.testing import assert_close, poison

NATIVE = BackendCalls(COMBINE, "native")
ARCHS = ("gfx942", "gfx950")
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WORK = 70_000  # splits x rows of a case: half a second; the default run takes less


def require_kernels(arch):
    require_built(arch, *(config.unaligned(archs.get(arch), dim).instance for dim in config.HEAD_DIMS_V))


arch = emulated(require_kernels, record=True)


def combine(partial_out, partial_lse, split_indptr=None, attn_sink=None, **options):
    """The native kernel's result, in outputs that were poisoned."""
    given = (partial_out, partial_lse, split_indptr, attn_sink)
    choice = mla_suite.explain("combine", *given, **options)
    assert choice.backend == "native", str(choice)
    return merge_runs.into_poisoned(*given, **options)


CASES = list(enumerate(cover(5_000)))


@pytest.mark.parametrize(("index", "case"), CASES, ids=[f"s{s}-h{h}-t{t}" for _, (s, h, t) in CASES])
def test_pairs_of_splits_heads_and_tokens(index, case):
    splits, heads, tokens = case
    name = ARCHS[index % 2]
    head_dim_v = 512 if index % 3 else 128
    out_dtype = DTYPES[index // 2 % 3]
    require_built(name, config.unaligned(archs.get(name), head_dim_v).instance)
    out, lse = partials(tokens * splits, heads, head_dim_v)
    sink = torch.randn(heads) if index % 4 == 0 else None
    with mla_suite.emulate(name):
        result = combine(out, lse, None, sink, num_splits=splits, out_dtype=out_dtype)
    assert_close(*result, exact(out, lse, range(0, tokens * splits + 1, splits), sink))


@pytest.mark.full
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_whole_product(arch, heads, splits):
    """As much of the product as the emulator can hold in a case; tests/gpu/test_combine_on_gpu.py has the rest."""
    for tokens in TOKENS:
        if splits * heads * tokens <= MAX_WORK:
            head_dim_v = 512 if splits * heads * tokens < 12_000 else 128
            out, lse = partials(tokens * splits, heads, head_dim_v)
            result = combine(out, lse, num_splits=splits)
            assert_close(*result, exact(out, lse, range(0, tokens * splits + 1, splits)))


@pytest.mark.parametrize(
    ("head_dim_v", "counts"),
    [*((dim, [0, 1, 5, 0, 33, 2, 161, 1]) for dim in config.HEAD_DIMS_V), (128, [1024, 0, 1500, 1])],
    ids=str,
)
def test_ragged_splits_with_a_sink(arch, head_dim_v, counts):
    """No number of splits is too large: of more than a workgroup has threads each lane owns several."""
    merge_runs.ragged_splits_with_a_sink(combine, CPU, head_dim_v, counts)


# Values that are not read, and values that are not hidden


@pytest.fixture(params=[a_row_by_eight_waves, four_rows])
def chosen(request, arch, monkeypatch):
    """Calls are merged by several waves for a row, or by one for several rows."""
    monkeypatch.setattr(config, "choose", lambda *facts: (request.param(arch), "by the test"))
    dispatch.clear_caches()
    yield
    dispatch.clear_caches()


@pytest.mark.usefixtures("chosen")
def test_what_is_not_read_and_what_is_nan():
    merge_runs.what_is_not_read_and_what_is_nan(combine, CPU)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("splits", [6, 150])
def test_plus_infinity_beside_zeros_is_a_part_without_keys(splits):
    merge_runs.plus_infinity_beside_zeros_is_a_part_without_keys(combine, CPU, splits)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_nan_and_infinity_survive_rounding(arch, out_dtype):
    out, lse = hard_to_round()
    assert_rounded(*combine(out, lse, num_splits=2, out_dtype=out_dtype))


def test_sinks(arch):
    merge_runs.sinks(combine, CPU)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_one_split_passes_through(arch, out_dtype):
    out, lse = partials(3, 5, spread=90.0)
    merged, total = combine(out, lse, num_splits=1, out_dtype=out_dtype)
    assert torch.equal(merged, out.to(out_dtype))
    assert torch.equal(total, lse)


def test_skip_single_leaves_those_rows(arch):
    merge_runs.skip_single(combine, CPU)


def test_merge_of_ragged_queries(arch):
    """Decode asks for it: partial rows of 3 query tokens, out of 1, 3 and 0 tokens; the second was never split."""
    heads, bounds, tokens = 8, [0, 2, 2, 7], [0, 1, 4, 4]
    partial_out, partial_lse = partials(7, 3 * heads)
    out, lse = poison(torch.empty(4, heads, 512)), poison(torch.empty(4, heads))
    splits, cu_seqlens_q = (torch.tensor(words, dtype=torch.int32) for words in (bounds, tokens))
    names = ("partial_out", "partial_lse", "split_indptr", "cu_seqlens_q")
    slots = {name: Input(position) for position, name in enumerate(names)}
    launch = kernels.launch_of(
        config.invariant(arch, 512, 9 * heads),
        (3, 3 * heads, heads),
        tuple(tensor.stride()[:2] for tensor in (partial_out, partial_lse, out)),
        (LseLayout.contiguous(heads), False),
        True,
        out.dtype,
        1,
        0,
        (True, False),
        {**slots, "attn_sink": None, **kernels.OUTPUTS},
    )
    given = partial_out, partial_lse, splits, cu_seqlens_q
    run.prepare("combine", CallSpec((launch,)), (out, lse), given)((out, lse), given)
    wanted = exact(partial_out[:, :heads], partial_lse[:, :heads], [0, 2])
    assert_close(out[:1], lse[:1], wanted)
    assert bool(out[1:].isnan().all())
    assert bool(lse[1:].isnan().all())


# Memory


def test_strided_outputs_and_partials(arch):
    merge_runs.strided_outputs_and_partials(CPU)


def test_odd_addresses_take_the_kernel_of_single_values(arch):
    room = torch.randn(6 * 5 * 515 + 1)
    out = room[1:].as_strided((6, 5, 512), (5 * 515, 515, 1))
    lse = torch.randn(6, 5)
    with emulator.configured(collect=True) as reports:
        result = combine(out, lse, num_splits=3)
    assert "vec_1" in reports[0].kernel
    assert not reports[0].findings
    assert_close(*result, exact(out, lse, [0, 3, 6]))


def test_partials_beyond_two_to_the_31_elements(arch):
    merge_runs.partials_beyond_two_to_the_31_elements(combine, CPU)


def test_the_same_bits_in_any_order_of_workgroups(arch):
    out, lse = partials(3 * 66, 16)
    first = combine(out, lse, num_splits=66)
    for order, threads in (("reverse", 1), ("forward", 2)):
        with emulator.configured(order=order, threads=threads):
            again = combine(out, lse, num_splits=66)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("splits", [2, 7, 70])
def test_the_invariant_kernels_give_a_row_the_same_bits_in_any_batch(arch, splits):
    """Alone by the kernel for few rows, among others by either; 70 splits are more than a wave has lanes."""
    out, lse = partials(5 * splits, 12)
    lse[splits + 1] = -INF
    few, many = (config.invariant(arch, 512, rows) for rows in (1, 1 << 20))
    assert few != many

    def merged(point, first, batch):
        result = torch.empty(batch, 12, 512)
        total = torch.empty(batch, 12)
        rows = slice(splits * first, splits * (first + batch))
        NATIVE.run(point, (result, total), out[rows], lse[rows], num_splits=splits)
        return result, total

    for point in (few, many):
        whole, totals = merged(point, 0, 5)
        for b in range(5):
            alone, total = merged(few, b, 1)
            assert torch.equal(alone[0], whole[b])
            assert torch.equal(total[0], totals[b])


# The template's axes


ROWS_ON_ARCHS = pytest.mark.parametrize(("arch", "rows"), in_turn(ARCHS, config.ROW_COUNTS), indirect=["arch"])
"""Every number of rows on one arch; a full run takes both, since each point is a run of the compiler."""


@ROWS_ON_ARCHS
def test_every_point_runs(arch, rows, tmp_path, monkeypatch):
    """The 16 points of rows x vec, each compiled and executed: ragged splits, a last workgroup not full.

    Every other point is the one of 128 columns; which of them they are is the other way round on the other arch.
    """
    bounds = [0, 2, 2, 11]
    for vec in config.VECS:
        head_dim_v = config.HEAD_DIMS_V[(rows.bit_length() + vec.bit_length() + ARCHS.index(arch.name)) % 2]
        out, lse = partials(11, 5, head_dim_v)
        point = CombineConfig(arch, head_dim_v, rows, vec, waves=8, slices=1)
        launch_compiled(point, tmp_path, monkeypatch)
        merged, total = torch.empty(3, 5, head_dim_v), torch.empty(3, 5)
        NATIVE.run(point, (merged, total), out, lse, torch.tensor(bounds, dtype=torch.int32))
        assert_close(merged, total, exact(out, lse, bounds))


def launch_compiled(point, folder, monkeypatch):
    """Compiles a point and has launches of combine run it. Returns the list that gets their reports."""
    machine, reports = emulator.Emulator(point.arch.name), []
    source, name = CSRC / point.arch.name / "combine.hip", "combine_point"
    text = assembly(
        point.arch.name, source, folder / f"{point.instance}.s", point.constants | {"MLA_SUITE_KERNEL": name}
    )
    program = machine.load_text(text, name)

    def bind(kernel, grid, threads, smem, overlap):
        def start(params, buffers):
            memories = [emulator.Memory.of(*buffer) for buffer in buffers]
            reports.append(machine.launch(program, grid, threads, smem, params, memories))
            assert not reports[-1].findings, reports[-1].findings

        return start

    driver = SimpleNamespace(checks_buffers=True, bind=bind)
    monkeypatch.setattr(launcher, "find", lambda op, kernel, tensor: (driver, kernel))
    return reports


@ROWS_ON_ARCHS
def test_splits_compiled_in(arch, rows, tmp_path, monkeypatch):
    """16 splits of every sequence: a row that is dead, one that is NaN, a last workgroup not full, a sink.

    It takes fewer instructions than the kernel for any number, except where a wave has all splits of a row.
    """
    vec = (4, 2, 1, 4)[config.ROW_COUNTS.index(rows)]
    out, lse = partials(3 * 16, 5)
    lse[16:32, 2] = -INF
    lse[1:15, 0] = -INF
    lse[3, 4] = NAN
    poison(out[16:32, 2])
    poison(out[1:15, 0])
    sink = torch.randn(5)
    instructions = {}
    for fixed in (0, 16):
        point = CombineConfig(arch, 512, rows, vec, waves=8, slices=1, fixed_splits=fixed)
        reports = launch_compiled(point, tmp_path, monkeypatch)
        for attn_sink in (None, sink):
            merged, total = poison(torch.empty(3, 5, 512)), poison(torch.empty(3, 5))
            NATIVE.run(point, (merged, total), out, lse, None, attn_sink, num_splits=16)
            assert merged[0, 4].isnan().all()
            assert total.isnan().nonzero().tolist() == [[0, 4]]
            assert torch.equal(merged[1, 2], torch.zeros(512))
            assert total[1, 2] == -INF
            rest = [0, 1, 3]
            wanted = exact(out[:, rest], lse[:, rest], [0, 16, 32, 48], None if attn_sink is None else sink[rest])
            assert_close(merged[:, rest], total[:, rest], wanted)
        instructions[fixed] = reports[0].instructions()
    assert instructions[16] < (0.9 if rows < 8 else 1.05) * instructions[0], instructions


def test_a_launch_error_names_operator_and_kernel(arch, monkeypatch):
    packing = run._packing

    def shorter(launch):
        return SimpleNamespace(pack=lambda *values: b""), packing(launch)[1]

    monkeypatch.setattr(run, "_packing", shorter)
    out, lse = partials(2, 4)
    with pytest.raises(LaunchError, match="combine: kernel combine_dv-512"):
        combine(out, lse, num_splits=2)
