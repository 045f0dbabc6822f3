"""Debug builds: a wait of csrc/sm_90 that nothing ends is a trap that names it (csrc/sm_90/spin_limit.hpp).

What nvcc makes of the waits is read here; test_swap_ab_on_host.py executes one that is never ended.
"""

from __future__ import annotations

import subprocess

import pytest

from mla_suite.archs import CSRC
from mla_suite.build import compilers, manifest
from mla_suite.build.instances import instances

TRAP = b"__assertfail"  # the function of the CUDA driver that prints the message and traps
WAITS = {  # instance -> words of the messages of some of its waits
    "decode_dtype-bf16_dqk-576_kvsource-tma_clustermode-none": [
        (b"decode/producer.hpp", b"wait_for_tma_stage"),
        (b"decode/mainloop_qk.hpp", b"load_q"),
        (b"decode/mainloop_pv.hpp", b"an mbarrier's phase is complete"),
    ],
    "streaming_combine_dv-512_waves-8_slices-4_runs-2": [
        (b"combine/streaming_combine.hpp", b"decode has stored the log-sum-exp of a partial"),
        (b"wait_for_lse", b"accumulate"),
        (b"combine/streaming_combine.hpp", b"decode has stored the columns of a partial"),
    ],
}


@pytest.fixture(scope="module")
def nvidia():
    found = compilers.find_nvidia()
    if found is None:
        pytest.skip("nvcc is not installed")
    return found


@pytest.mark.parametrize("name", WAITS)
def test_a_debug_object_names_its_waits(tmp_path, nvidia, name):
    (instance,) = (instance for instance in instances("sm_90") if instance.id == name)
    made = tmp_path / "object.cubin"
    defines = [f"-D{key}={value}" for key, value in instance.constants.items()]
    defines += [f"-DMLA_SUITE_KERNEL={instance.symbol}", f"-I{CSRC}"]
    command = [*nvidia.for_debugging().to_object("sm_90"), *defines, str(CSRC / instance.source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = made.read_bytes()
    assert TRAP in data
    for words in WAITS[name]:
        assert all(word in data for word in words), words


def test_release_objects_trap_only_where_they_wait_for_another_kernel():
    entries = [entry for entry in manifest.installed().kernels.values() if entry.arch == "sm_90"]
    if not entries:
        pytest.skip("sm_90 is not built; run `python -m mla_suite build --arch sm_90`")
    traps = {entry.kernel for entry in entries if TRAP in entry.read_object()}
    assert traps == {"streaming_combine"}


def loop_without_work(line: str) -> bool:
    """Whether a line is a `while` whose body does nothing, sleeps, or counts tries: it waits for another thread."""
    at = line.find("while (")
    if at < 0:
        return False
    depth, end = 0, at + len("while ")
    while True:
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
        if depth == 0 or end == len(line):
            return line[end:].strip() in (";", "__nanosleep(PAUSE);", "limit.again();")


def test_every_loop_that_waits_is_bounded():
    """Each asks a SpinLimit or a TimeLimit, and only the mbarriers' wait of release builds loops in PTX."""
    lines = {path.name: path.read_text().splitlines() for path in (CSRC / "sm_90").rglob("*.hpp")}
    found = [(name, line) for name, text in lines.items() for line in text if loop_without_work(line)]
    assert sorted(name for name, _ in found) == ["mbarrier.hpp", "streaming_combine.hpp", "streaming_combine.hpp"]
    assert [line for _, line in found if "limit.again()" not in line] == []
    assert [name for name, text in lines.items() if any("bra waiting;" in line for line in text)] == ["mbarrier.hpp"]


def test_a_loop_that_waits_is_told_from_one_that_works():
    assert loop_without_work("    while (word == SENTINEL);")
    assert loop_without_work("  while (load(from, to)) __nanosleep(PAUSE);")
    assert not loop_without_work("    while (later.left > 0) later.scan(p, table, end);")
    assert not loop_without_work("    while (low < high) {")
