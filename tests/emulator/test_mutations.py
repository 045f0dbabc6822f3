"""A kernel with one instruction deleted gives a finding of the sanitizer, or the same bytes as before.

Every executed barrier, wait, write-back, invalidate, atomic and store of the kernels in kernels/mutated.hip is deleted
in turn, then barriers, waits and stores of our own kernels' machine code; outputs are shrunk, and memory is left
uninitialised.

Two exceptions, and a barrier of plan that its test counts: a wait changes nothing where the text waits for the
same again on every way from there (`why_redundant` finds that, or the test fails); and what a kernel leaves in memory
for the next launch, as the reset of an arrival counter, is noticed in the next launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_calls import BackendCalls
from built import assembly, require_built
from mutations import Launch, contents, deletions, mutate, table, why_redundant

import mla_suite
from mla_suite import archs
from mla_suite.archs import combine as combine_config
from mla_suite.archs.append_kv import MAX_TOKENS, AppendConfig
from mla_suite.core import dispatch, register
from mla_suite.emulator import Emulator, Memory
from mla_suite.emulator.driver import EmulatorDriver
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample

WIDTH = {"gfx942": 4, "gfx950": 16}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Assembly of kernels/mutated.hip by arch."""
    folder = tmp_path_factory.mktemp("mutated")
    source = Path(__file__).parent / "kernels" / "mutated.hip"
    return {arch: assembly(arch, source, folder / arch, {"WIDTH": width}) for arch, width in WIDTH.items()}


# The grid, arrays with their access by name, and the number behind them.
Problem = tuple[tuple[int, int, int], dict[str, tuple[np.ndarray, str]], int]


def pipeline(rng: np.random.Generator, arch: str) -> Problem:
    tiles = rng.standard_normal((3, 32, 32)).astype(np.float32)
    return (1, 1, 1), {"in": (tiles, "r"), "out": (np.zeros_like(tiles[0]), "all")}, 3


def split(rng: np.random.Generator, arch: str) -> Problem:
    x = rng.standard_normal((2, 3, 256)).astype(np.float32)
    arrays = {"in": (x, "r"), "partial": (np.zeros_like(x), "all"), "out": (np.zeros((2, 256), np.float32), "all")}
    return (3, 2, 1), {**arrays, "arrived": (np.zeros(2, np.uint32), "rw")}, 3


def stream(rng: np.random.Generator, arch: str) -> Problem:
    tiles = rng.integers(0, 256, (5, 256 * WIDTH[arch])).astype(np.uint8)
    return (1, 1, 1), {"in": (tiles, "r"), "out": (np.zeros_like(tiles), "all")}, 5


PROBLEMS = {problem.__name__: problem for problem in (pipeline, split, stream)}


def launch_of(kernel: str, arch: str, text: str) -> Launch:
    """One of the kernels of mutated.hip with its data; every output must be written whole."""
    grid, arrays, count = PROBLEMS[kernel](np.random.default_rng(3), arch)
    params = struct.pack(f"<{len(arrays)}Qi", *(array.ctypes.data for array, _ in arrays.values()), count)
    memory = [Memory.of(name, array, access) for name, (array, access) in arrays.items()]
    return Launch(Emulator(arch), text, kernel, grid, 256, 0, params, memory, list(arrays.values()), contents(memory))


@pytest.fixture(params=PROBLEMS)
def launch(request: pytest.FixtureRequest, arch: str, texts: dict[str, str]) -> Launch:
    return launch_of(request.param, arch, texts[arch])


def judge(launch: Launch, kinds: tuple[str, ...], most: int) -> dict[str, int]:
    """Deletes and asserts. The number of deletions of each kind, all of them reported; of waits, those reported."""
    done = mutate(launch, kinds, lambda kind: most)
    print(table(launch.kernel, done))
    for mutation in done:
        place = f"{launch.kernel}, line {mutation.line + 1}: `{mutation.removed}`"
        assert mutation.outcome != "missed", f"{place}: another result, and no finding"
        if mutation.outcome == "without effect":
            assert mutation.kind == "wait", f"{place}: neither a finding nor another result"
            assert why_redundant(launch.text, launch.kernel, mutation.line), f"{place}: nothing says why it can go"
    return {kind: sum(m.kind == kind and m.outcome == "reported" for m in done) for kind in kinds}


# Instructions of each kernel, so that a compiler that leaves nothing to delete is noticed; for waits, the least number.
HAS = {
    "pipeline": {"barrier": 1, "write-back": 0, "invalidate": 0, "atomic": 0, "wait": 5},
    "split": {"barrier": 2, "write-back": 1, "invalidate": 1, "atomic": 1, "wait": 6},
    "stream": {"barrier": 1, "write-back": 0, "invalidate": 0, "atomic": 0, "wait": 3},
}


def test_each_instruction_of_synchronisation(launch):
    expected = dict(HAS[launch.kernel])
    found = judge(launch, tuple(expected), 20)
    assert found.pop("wait") >= expected.pop("wait")
    assert found == expected


def test_each_store(launch):
    """Finds outputs that are never written, and memory that is read and was never written."""
    done = mutate(launch, ("store",))
    assert len(done) >= {"pipeline": 3, "split": 3, "stream": 1}[launch.kernel]
    for mutation in done:
        if launch.kernel == "split" and mutation.line == done[-1].line:
            # The reset of the arrival counter, whose test is below.
            assert mutation.outcome == "missed"
        else:
            assert mutation.kinds & {"global_unwritten", "global_uninitialised", "lds_uninitialised"}, mutation.removed


def test_a_counter_that_was_not_reset_is_noticed_by_the_next_launch(texts, arch):
    launch = launch_of("split", arch, texts[arch])
    ctypes.memset(launch.memory[-1].address, 1, 8)  # as the launch without the reset leaves it: not zero
    launch = launch._replace(contents=contents(launch.memory))
    report, _ = launch.run(launch.text, "forward")
    assert [finding.kind for finding in report.findings] == ["global_unwritten"]
    assert str(report.findings[0]).startswith(
        "global_unwritten: split: 2048 bytes of the output, the first at out + 0x0"
    )


@pytest.mark.parametrize("how", ["shrink an output", "shrink an input", "initialise nothing"])
def test_memory_that_is_not_there(launch, how):
    """Each buffer in turn a row short, or holding nothing."""
    expected = {"shrink": "global_out_of_bounds", "initialise": "global_uninitialised"}[how.split()[0]]
    for i, memory in enumerate(launch.memory):
        output = memory.access == "all"
        if output != (how == "shrink an output"):
            continue
        changed = memory._replace(access="w")
        if how.startswith("shrink"):
            changed = memory._replace(shape=(memory.shape[0] - 1, *memory.shape[1:]))
        short = launch._replace(memory=[*launch.memory[:i], changed, *launch.memory[i + 1 :]])
        for order in ("forward", "reverse"):
            report, _ = short.run(launch.text, order)
            assert expected in {finding.kind for finding in report.findings}, memory.name


# Our own kernels


@contextmanager
def first_launch(most: int = 1) -> Iterator[list[Launch]]:
    """Fills the list with the first launches done inside, to be done again."""
    found: list[Launch] = []
    usual = EmulatorDriver.bind

    def recorded(self, kernel, grid, block, dynamic_lds, overlap=False):
        start = usual(self, kernel, grid, block, dynamic_lds, overlap)

        def recording(params, buffers):
            if len(found) < most:
                owners = list(buffers)
                memory = [Memory.of(*buffer) for buffer in owners]
                text, symbol = kernel.entry.read_text(), kernel.entry.symbol
                machine, before = Emulator(self.arch.name), contents(memory)
                found.append(Launch(machine, text, symbol, grid, block, dynamic_lds, params, memory, owners, before))
            start(params, buffers)

        return recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatorDriver, "bind", recorded)
        dispatch.clear_caches()  # calls that were bound before, and after the test those of `recorded`
        try:
            yield found
        finally:
            dispatch.clear_caches()


def test_combine(arch):
    point = combine_config.CombineConfig(archs.get(arch), 512, rows=1, vec=4, waves=8, slices=1)
    require_built(arch, point.instance)
    out, lse, sink = torch.randn(2 * 33, 3, 512), torch.randn(2 * 33, 3), torch.randn(3)
    results = torch.zeros(2, 3, 512), torch.zeros(2, 3)
    with mla_suite.emulate(arch), first_launch() as found:
        BackendCalls(register.get("combine"), "native").run(point, results, out, lse, None, sink, num_splits=33)
    reported = judge(found[0], ("barrier", "wait", "store"), 20)
    assert reported["barrier"] == 2
    assert reported["wait"] >= 10
    assert reported["store"] >= 2


# Lengths and sm parts: few sequences that are split, or more sequences than a workgroup has threads.
LONG_ONES = [5000, 3, 0, 900, 7000], 64, {}
MANY = [17 * i % 700 for i in range(600)], 100, {}
IN_THREE = [17 * i % 700 for i in range(300)], 100, {"num_splits": 3}
BY_SIZE = [17 * i % 700 for i in range(300)], 100, {"split_size": 256}


def test_plan(arch):
    """Every barrier, over problems that together take every path.

    In two places a barrier follows another with nothing between that it is needed for: behind the largest length, where
    the line has its own, and between the two prefix sums of a plan with split_size.
    """
    require_built(arch, "plan_step-search_waves-4")
    outcomes: dict[tuple[str, int], set[str]] = {}
    for lengths, num_sm_parts, options in (LONG_ONES, MANY, IN_THREE, BY_SIZE):
        lens = torch.tensor(lengths, dtype=torch.int32)
        with mla_suite.emulate(arch), first_launch(2) as found:
            mla_suite.plan(lens, num_heads=16, num_sm_parts=num_sm_parts, max_seqlen_kv=8192, **options)
        for launch in found:
            for mutation in mutate(launch, ("barrier",)):
                outcomes.setdefault((launch.kernel, mutation.line), set()).add(mutation.outcome)
    needless: dict[str, int] = {}
    for (kernel, _), seen in outcomes.items():
        assert "missed" not in seen, kernel
        step = kernel.split("_")[2]
        needless[step] = needless.get(step, 0) + ("reported" not in seen)
    assert needless == {"search": 1, "balanced": 0, "uniform": 1}


def test_append_kv(arch):
    """The barriers of a workgroup with many tokens, some of which have the same slot; 20 of the waits."""
    config = AppendConfig(archs.get(arch), MAX_TOKENS)
    require_built(arch, config.instance)
    tokens = 700
    cache, slots = torch.zeros(12, 64, 576, dtype=torch.bfloat16), torch.arange(tokens) * 3 % 701 % 650
    rows = torch.randn(tokens, 512).bfloat16(), torch.randn(tokens, 64).bfloat16()
    with mla_suite.emulate(arch), first_launch() as found:
        BackendCalls(register.get("append_kv"), "native").run(config, (), *rows, cache, slots, kv_format="bf16")
    reported = judge(found[0], ("barrier", "wait"), 20)
    assert reported["barrier"] == 3
    assert reported["wait"] >= 10


# Lengths after which the next item's copies go where the last tile of the one before it was read.
@pytest.mark.parametrize(
    ("name", "rows", "kv_format", "lengths"),
    [
        ("gfx942", 16, "bf16", (130, 40)),
        ("gfx942", 64, "bf16", (80, 40)),
        ("gfx942", 64, "fp8_fnuz", (96, 64)),
        ("gfx950", 16, "bf16", (130, 40)),
        ("gfx950", 64, "bf16", (130, 40)),
    ],
)
def test_decode(name, rows, kv_format, lengths):
    """Several items for one workgroup, so that the barrier between two items counts; 20 of the waits."""
    instance = f"decode_dtype-bf16_rows-{rows}_width-576_rotate-0"
    if kv_format == "fp8_fnuz":
        instance = f"decode_fp8_query-bf16_weight-bf16_rows-{rows}"
    require_built(name, instance)
    args, kwargs = decode_sample(lengths, heads=rows, kv_format=kv_format, planned=True).make(CPU)
    plan = mla_suite.plan(args[2], num_heads=rows, num_sm_parts=1, max_seqlen_kv=max(lengths))
    with mla_suite.emulate(name), first_launch() as found:
        mla_suite.decode(*args[:11], plan, **kwargs)
    (launch,) = found
    reported = judge(launch, ("barrier", "wait"), 20)
    assert reported["barrier"] == len(list(deletions(launch.text, launch.kernel, "barrier"))) >= 2
    assert reported["wait"] >= 8  # by compiler: 10 with clang 19, 20 with clang 22


@pytest.mark.parametrize("rows", [16, 64])
def test_sparse_decode(rows):
    """Several items for one workgroup, which renew their references in the first tile; 12 of the waits."""
    instance = f"sparse_decode_kvformat-dsv4_rows-{rows}"
    require_built("gfx950", instance)
    pools = [PoolShape("dsv4", 2, 64, 150), PoolShape("dsv4", 9, 16, 30)]
    args, kwargs = sparse_sample(2, 1, rows, pools, sink=True).make(CPU)
    plan = mla_suite.plan(torch.full((2,), 180, dtype=torch.int32), num_heads=rows, num_sm_parts=1, max_seqlen_kv=180)
    with mla_suite.emulate("gfx950"), first_launch() as found:
        torch.ops.mla_suite.sparse_decode(*args[:6], plan, **kwargs)
    (launch,) = found
    reported = judge(launch, ("barrier", "wait"), 12)
    assert reported["barrier"] == len(list(deletions(launch.text, launch.kernel, "barrier"))) >= 4
    assert reported["wait"] >= 6
