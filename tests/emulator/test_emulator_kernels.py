"""Compiled kernels: numpy's numbers with nothing for the sanitizer to find, and rules that they break on purpose.

test_mutations.py deletes waits, barriers and stores.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from mla_suite.emulator import AssemblyError, Emulator

PROGRAMS = Path(__file__).with_name("programs.hip").read_text().split("\n")
rng = np.random.default_rng(12)


def kinds(report):
    return {finding.kind for finding in report.findings}


def last_arrays(blocks):
    x = rng.standard_normal((blocks, 256)).astype(np.float32)
    arrays = {"in": (x, "r"), "partial": (np.full_like(x, np.nan), "w"), "out": (np.empty(256, np.float32), "w")}
    return {**arrays, "arrived": (np.zeros(1, np.uint32), "rw")}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle:3"])
def test_last_arriver(launch, order, threads):
    arrays = last_arrays(7)
    report = launch("last_arriver", 7, 256, arrays, 7, order=order, threads=threads)
    assert [str(finding) for finding in report.findings] == []
    want = np.zeros(256, np.float32)
    for row in arrays["in"][0]:
        want += 2 * row
    np.testing.assert_array_equal(arrays["out"][0], want)
    assert arrays["arrived"][0][0] == 0


def test_private_memory(launch):
    """What a compiler spills comes back, and nothing beyond its size is touched."""
    out = np.zeros(128, np.uint32)
    arrays = {"out": (out, "w")}
    assert launch("private_memory", 1, 128, arrays, 2).findings == ()
    np.testing.assert_array_equal(out, 3 * np.arange(128) + (np.arange(128) - 2) % 512)
    less = re.sub(r"(amdhsa_private_segment_fixed_size) [1-9]\d*", r"\1 12", launch.text)
    assert kinds(launch("private_memory", 1, 128, arrays, 2, text=less)) == {"scratch_out_of_bounds"}


def test_unknown_instruction_names_its_line(launch):
    broken = launch.text.replace("v_add_f32_e32", "v_invented_f32_e32")
    with pytest.raises(
        AssemblyError, match=r"add, line \d+ \(.*programs\.hip:\d+\): `v_invented_f32_e32.*does not know"
    ):
        launch("add", 1, 64, {}, text=broken)


def test_instruction_of_the_other_arch(programs):
    text = programs["gfx950"].replace("gfx950", "gfx942")
    with pytest.raises(AssemblyError, match=r"v_mfma_f32_16x16x32_bf16.*does not exist on the architecture"):
        Emulator("gfx942").load_text(text, "matmul")
    with pytest.raises(AssemblyError, match="no kernel absent in this assembly; it has add, transpose"):
        Emulator("gfx950").load_text(programs["gfx950"], "absent")
    with pytest.raises(AssemblyError, match="written|is for gfx950"):
        Emulator("gfx942").load_text(programs["gfx950"], "add")


def add_arrays(size=1000):
    a, b = rng.standard_normal((2, 1000), np.float32)
    return {"a": (a, "r"), "b": (b, "r"), "out": (np.empty(size, np.float32), "w")}


def test_out_of_bounds(launch):
    report = launch("add", 4, 256, add_arrays(990), 1000)
    (finding,) = report.findings
    assert finding.kind == "global_out_of_bounds"
    assert finding.address == "out + 0xf78"
    assert finding.workgroup == 3
    assert finding.wave == 3
    assert finding.count == 10
    assert PROGRAMS[int(finding.source.rsplit(":", 1)[1]) - 1].endswith("p.out[i] = p.a[i] + p.b[i];")
    assert "global_store_dword" in finding.instruction


def test_a_store_to_what_may_only_be_read(launch):
    arrays = add_arrays()
    arrays["out"] = arrays["out"][0], "r"
    assert kinds(launch("add", 4, 256, arrays, 1000)) == {"global_read_only"}


def test_holes_of_a_strided_buffer(launch):
    arrays = add_arrays()
    wide = np.zeros((500, 4), np.float32)
    arrays["out"] = (wide[:, :2], "w")
    report = launch("add", 4, 256, arrays, 1000)
    assert kinds(report) == {"global_out_of_bounds"}
    assert report.findings[0].count == 500
    assert not wide[:, 2:].any()


@pytest.mark.parametrize(
    ("strided", "missing"), [(False, "40 bytes of the output, the first at out + 0xf78"), (True, "2016 bytes")]
)
def test_an_output_that_is_not_written_whole(launch, strided, missing):
    """990 of 1000 values; into [500, 2] with rows 16 bytes apart they fill 248 rows, and no buffer owns the holes."""
    arrays = add_arrays()
    wide = np.zeros((500, 4), np.float32)
    arrays["out"] = (wide[:, :2] if strided else wide.reshape(-1)[:1000], "all")
    report = launch("add", 4, 256, arrays, 990)
    finding = next(item for item in report.findings if item.kind == "global_unwritten")
    assert finding.explanation.startswith(missing)
    assert finding.instruction == finding.source == ""
    if not strided:
        assert launch("add", 4, 256, arrays, 1000).findings == ()


def transpose_arrays():
    x = rng.standard_normal((32, 32)).astype(np.float32)
    return {"in": (x, "r"), "out": (np.empty_like(x), "w")}


def test_plain_store_instead_of_the_atomic(launch):
    lines = launch.text.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("last_arriver:"))
    at = next(i for i in range(begin, len(lines)) if "global_atomic_add" in lines[i])
    register, address, data, base = lines[at].split(";")[0].replace("global_atomic_add", "").split(",")
    load = f"\tglobal_load_dword {register.strip()}, {address}, {base.replace('sc0', '')}"
    store = f"\tglobal_store_dword {address}, {data}, {base.replace('sc0', '')}"
    text = "\n".join([*lines[:at], load, store, *lines[at + 1 :]])
    assert "global_unordered" in kinds(launch("last_arriver", 5, 256, last_arrays(5), 5, text=text))


def test_divergent_barrier(launch):
    lines = launch.text.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("transpose:"))
    early = ["\tv_cmp_gt_u32_e32 vcc, 64, v0", "\ts_cbranch_vccz .LEARLY", "\ts_barrier", ".LEARLY:"]
    text = "\n".join([*lines[: begin + 1], *early, *lines[begin + 1 :]])
    assert "divergent_barrier" in kinds(launch("transpose", 1, 256, transpose_arrays(), text=text))


@pytest.mark.parametrize("threads", [1, 2])
def test_spinning_on_a_later_workgroup(launch, threads):
    arrays = {"flag": (np.zeros(1, np.uint32), "rw"), "out": (np.zeros(4, np.float32), "rw")}
    report = launch("waits_for_last", 4, 64, arrays, 4, threads=threads)
    assert "spin" in kinds(report)


def test_waiting_for_an_earlier_workgroup(launch):
    out = np.zeros(4, np.float32)
    arrays = {"flag": (np.zeros(1, np.uint32), "rw"), "out": (out, "rw")}
    assert launch("waits_for_last", 4, 64, arrays, 4, order="reverse").findings == ()
    assert out.tolist() == [1, 1, 1, 1]


def test_instruction_limit(launch):
    arrays = {"flag": (np.zeros(1, np.uint32), "rw"), "out": (np.zeros(2, np.float32), "rw")}
    options = {"spin_limit": 1 << 40, "instruction_limit": 5000, "threads": 1}
    assert kinds(launch("waits_for_last", 2, 64, arrays, 2, **options)) == {"instruction_limit"}


def test_unchecked_runs_keep_the_bounds(launch):
    report = launch("add", 4, 256, add_arrays(990), 1000, checks=False)
    assert kinds(report) == {"global_out_of_bounds"}
