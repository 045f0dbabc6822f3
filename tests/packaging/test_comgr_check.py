"""comgr's check reads what this tree ships: every declared kernel, and nothing that a user's own rows had built."""

import dataclasses

import comgr_check
import pytest

from mla_suite.build import ObjectError, manifest
from mla_suite.build.instances import instances


@pytest.fixture
def shipped():
    """The entries of gfx942's declared kernels, which a build has made."""
    try:
        return comgr_check.shipped("gfx942")
    except ObjectError as error:
        pytest.skip(str(error))


def install(monkeypatch, kernels):
    made = dataclasses.replace(manifest.installed(), kernels=kernels)
    monkeypatch.setattr(manifest, "installed", lambda: made)


def test_kernels_of_a_users_tuned_rows_are_not_counted(shipped, monkeypatch):
    tuned = dataclasses.replace(shipped[0], id=f"{shipped[0].id}_of-a-tuned-row")
    install(monkeypatch, {("gfx942", entry.id): entry for entry in [*shipped, tuned]})
    assert comgr_check.shipped("gfx942") == shipped
    assert [entry.id for entry in shipped] == [item.id for item in instances("gfx942")]


def test_a_kernel_that_was_not_built_is_named(shipped, monkeypatch, capsys):
    install(monkeypatch, {("gfx942", entry.id): entry for entry in shipped[1:]})
    monkeypatch.setattr(comgr_check, "Comgr", lambda path: None)
    assert comgr_check.main("libamd_comgr.so.3", "gfx942") == 1
    assert f"no code object {shipped[0].id} for gfx942" in capsys.readouterr().err
