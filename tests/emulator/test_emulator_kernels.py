"""Compiled kernels give numpy's numbers, with nothing for the sanitizer to find."""

import numpy as np
import pytest

from mla_suite.emulator import AssemblyError

rng = np.random.default_rng(11)


def test_add(launch):
    a, b = rng.standard_normal((2, 1000), np.float32)
    out = np.full(1000, np.nan, np.float32)
    report = launch("add", 4, 256, {"a": (a, "r"), "b": (b, "r"), "out": (out, "w")}, 1000)
    assert report.findings == ()
    np.testing.assert_array_equal(out, a + b)
    assert report.stored["out"] == 4000
    assert report.loaded["a"] == report.loaded["b"] == 4000
    assert report.mix()["global_load_dword"] == 2 * 16
    assert report.mix()["v_add_f32"] == 16


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle:3"])
def test_last_arriver(launch, order, threads):
    x = rng.standard_normal((7, 256)).astype(np.float32)
    partial, out, arrived = np.full_like(x, np.nan), np.empty(256, np.float32), np.zeros(1, np.uint32)
    arrays = {"in": (x, "r"), "partial": (partial, "w"), "out": (out, "w"), "arrived": (arrived, "rw")}
    report = launch("last_arriver", 7, 256, arrays, 7, order=order, threads=threads)
    assert [str(finding) for finding in report.findings] == []
    want = np.zeros(256, np.float32)
    for row in x:
        want += 2 * row
    np.testing.assert_array_equal(out, want)
    assert arrived[0] == 0


def test_unknown_instruction_names_its_line(launch):
    broken = launch.text.replace("v_add_f32_e32", "v_invented_f32_e32")
    with pytest.raises(
        AssemblyError, match=r"add, line \d+ \(.*programs\.hip:\d+\): `v_invented_f32_e32.*does not know"
    ):
        launch("add", 1, 64, {}, text=broken)


def test_instruction_of_the_other_arch(programs):
    from mla_suite.emulator import Emulator

    text = programs["gfx950"].replace("gfx950", "gfx942")
    with pytest.raises(AssemblyError, match=r"v_mfma_f32_16x16x32_bf16.*does not exist on the architecture"):
        Emulator("gfx942").load_text(text, "matmul")
    with pytest.raises(AssemblyError, match="no kernel absent in this assembly; it has add, transpose"):
        Emulator("gfx950").load_text(programs["gfx950"], "absent")
    with pytest.raises(AssemblyError, match="written|is for gfx950"):
        Emulator("gfx942").load_text(programs["gfx950"], "add")
