"""Rules of the sanitizer that a kernel breaks on purpose; test_mutations.py deletes waits, barriers and stores."""

from pathlib import Path

import numpy as np
import pytest

PROGRAMS = Path(__file__).with_name("programs.hip").read_text().split("\n")
rng = np.random.default_rng(12)


def kinds(report):
    return {finding.kind for finding in report.findings}


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


@pytest.mark.parametrize(
    ("name", "access", "kind"), [("out", "r", "global_read_only"), ("a", "w", "global_uninitialised")]
)
def test_an_access_that_was_not_declared(launch, name, access, kind):
    arrays = add_arrays()
    arrays[name] = arrays[name][0], access
    assert kinds(launch("add", 4, 256, arrays, 1000)) == {kind}


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


def last_arrays(blocks=5):
    x = rng.standard_normal((blocks, 256)).astype(np.float32)
    arrays = {"in": (x, "r"), "partial": (np.empty_like(x), "w"), "out": (np.empty(256, np.float32), "w")}
    return {**arrays, "arrived": (np.zeros(1, np.uint32), "rw")}


def test_plain_store_instead_of_the_atomic(launch):
    lines = launch.text.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("last_arriver:"))
    at = next(i for i in range(begin, len(lines)) if "global_atomic_add" in lines[i])
    register, address, data, base = lines[at].split(";")[0].replace("global_atomic_add", "").split(",")
    load = f"\tglobal_load_dword {register.strip()}, {address}, {base.replace('sc0', '')}"
    store = f"\tglobal_store_dword {address}, {data}, {base.replace('sc0', '')}"
    text = "\n".join([*lines[:at], load, store, *lines[at + 1 :]])
    assert "global_unordered" in kinds(launch("last_arriver", 5, 256, last_arrays(), 5, text=text))


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
