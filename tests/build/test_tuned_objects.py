"""Kernels that tuned rows name: shipped rows are built with the package, others on demand into the user's cache."""

import pytest
from built import require_objects
from sample_tree import make

from mla_suite.archs import CSRC
from mla_suite.build import ObjectError, builder, locations, manifest
from mla_suite.build.instances import instance, instances

POINT = dict(D_V=128, ROWS=8, VEC=2, WAVES=8, SLICES=1)
ID = "combine_dv-128_rows-8_vec-2_waves-8_slices-1"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A user's cache that is empty, and a package whose kernels were built."""
    require_objects()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    manifest.forget()
    yield tmp_path / "cache"
    manifest.forget()


def test_a_missing_kernel_is_built_beside_the_package_and_found(cache, amd_compiler):
    shipped = manifest.installed()
    wanted = [instance("gfx942", "combine", POINT)]
    assert ID not in manifest.built("gfx942")
    assert builder.build_tuned(wanted) == 1
    assert ID in manifest.built("gfx942")
    entry = manifest.installed().find("gfx942", ID)
    assert entry.root.is_relative_to(cache)
    assert "v_fma_f32" in entry.read_text() or "v_fmac_f32" in entry.read_text()
    assert manifest.read(shipped.root).kernels == shipped.kernels, "the package's own objects stay as they were"
    assert builder.build_tuned(wanted) == 0, "nothing is compiled twice"
    other = instance("gfx942", "combine", POINT | {"VEC": 1})
    assert builder.build_tuned([other]) == 1
    assert ID in manifest.built("gfx942"), "what was built before stays"


def test_a_cache_that_others_may_write_is_refused(cache, amd_compiler):
    folder = locations.private_folder(locations.tree_hash(CSRC.resolve()) + locations.TUNED, "a test needs it")
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "manifest.json").write_text("{}")
    folder.chmod(0o777)
    manifest.forget()
    with pytest.raises(ObjectError, match="may be written by others"):
        manifest.installed()
    folder.chmod(0o700)
    manifest.forget()
    with pytest.raises(ObjectError, match=f"or delete {folder}"):
        manifest.installed()


def test_shipped_rows_are_instances(tmp_path):
    """A build makes what a row names, once; a constant whose cell is 0 is not defined."""
    csrc = make(tmp_path / "csrc")
    toml = csrc / "gfx942" / "arch.toml"
    toml.write_text(
        toml.read_text() + '[kernels.scale.tuned]\nop = "scale"\ncolumns = { THREADS = "threads", EXTRA = "extra" }\n'
    )
    before = [item.id for item in instances("gfx942", csrc)]
    assert before == [item.id for item in instances("gfx942", csrc)], "without a table nothing is added"
    table = tmp_path / "ops" / "scale" / "tuned" / "gfx942.csv"
    table.parent.mkdir(parents=True)
    table.write_text("rows,threads,extra\n1,128,0\n2,128,0\n4,128,7\n")
    added = [item.id for item in instances("gfx942", csrc) if item.id not in before]
    assert added == ["scale_threads-128", "scale_threads-128_extra-7"]
    table.write_text("rows,threads,extra\n1,many,0\n")
    with pytest.raises(ValueError, match="gfx942.csv lacks a number"):
        instances("gfx942", csrc)


def test_an_unknown_kernel_is_one_sentence():
    with pytest.raises(ValueError, match="gfx942 has no kernel 'combin'; it has decode"):
        instance("gfx942", "combin", POINT)
