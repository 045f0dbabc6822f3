"""Records of archs: how many waves a SIMD holds by them, and one sentence for each record that is wrong."""

import dataclasses

import pytest
from sample_tree import edit

from mla_suite import archs as arch


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("gfx942", {"vendor": "intel"}, "vendor 'intel' is not one of amd, nvidia"),
        ("gfx942", {"name": "sm_90"}, "amd names look like"),
        ("gfx942", {"fp8": "e4m3"}, "neither fnuz nor ocp"),
        ("gfx942", {"lds_bytes": 65_000}, "not whole granules"),
        ("gfx942", {"lds_bytes_per_clock": 256}, "above its peak"),
        ("gfx950", {"simds": 0}, "simds = 0 must be a positive integer"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(name, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(arch.get(name), **changes)


def test_occupancy():
    mi300, mi355 = arch.get("gfx942"), arch.get("gfx950")
    assert [mi300.waves_per_simd(registers, 0, 256) for registers in (24, 64, 65, 128, 129, 256, 257, 512)] == [
        8, 8, 7, 4, 3, 2, 1, 1,
    ]  # fmt: skip
    assert mi300.waves_per_simd(64, 32 << 10, 256) == 2
    assert mi300.waves_per_simd(64, 64 << 10, 256) == 1
    assert [mi355.waves_per_simd(64, lds << 10, 256) for lds in (64, 160, 161)] == [2, 1, 0]
    assert mi300.waves_per_simd(64, (64 << 10) + 1, 256) == 0, "more LDS than there is"
    assert mi300.waves_per_simd(520, 0, 256) == 0, "more registers than there are"
    assert arch.get("sm_90").waves_per_simd(255, 0, 128) == 2


def test_unknown_and_damaged_records(sources):
    with pytest.raises(ValueError, match="unknown arch 'gfx90a': known are gfx942, gfx950, sm_90"):
        arch.get("gfx90a")
    with pytest.raises(ValueError, match=r"unknown arch '../csrc/gfx942'"):
        arch.get("../csrc/gfx942")
    path = sources / "gfx942" / "arch.toml"
    edit(path, "wavefront = 64", "wave = 64")
    with pytest.raises(ValueError, match=r"unknown keys \['wave'\] and lacks \['wavefront'\]"):
        arch.get("gfx942", sources)
    path.write_text("[arch")
    arch.get.cache_clear()
    with pytest.raises(ValueError, match=r"arch\.toml: "):
        arch.get("gfx942", sources)
