"""Debian's packages of ROCm's runtimes: where they cannot be had a sentence says why, and what was fetched is kept.

apt itself is asked by `tox -e hip57,hip64,hip72,hip`.
"""

import debian_space
import pytest


@pytest.fixture
def spaces(tmp_path, monkeypatch):
    """An empty folder of user spaces, on a Debian release with apt."""
    released = tmp_path / "os-release"
    released.write_text('PRETTY_NAME="Debian"\nVERSION_CODENAME=bookworm\nID=debian\n')
    monkeypatch.setattr(debian_space, "OS_RELEASE", released)
    monkeypatch.setattr(debian_space.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(debian_space.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("MLA_SUITE_SPACES", str(tmp_path / "spaces"))
    return released


def test_a_machine_without_apt_is_told_so(spaces, monkeypatch):
    monkeypatch.setattr(debian_space.shutil, "which", lambda name: None)
    with pytest.raises(debian_space.Unavailable, match="with apt-get and dpkg-deb on x86-64, which this machine lacks"):
        debian_space.fetch("hip72")


def test_another_distribution_is_told_so(spaces):
    spaces.write_text("ID=fedora\nVERSION_CODENAME=x\n")
    with pytest.raises(debian_space.Unavailable, match="Debian's packages, and this machine is not a Debian release"):
        debian_space.fetch("hip72")


def test_a_user_space_that_is_there_is_used(spaces, monkeypatch):
    def unpacked(space, base, folder):
        folder.mkdir()
        (folder / debian_space.RECORD).write_text('{"libamdhip64-7": "7.2.4-1"}')

    with monkeypatch.context() as patch:
        patch.setattr(debian_space, "_fetch", unpacked)
        folder = debian_space.fetch("hip72")
    assert debian_space.fetch("hip72") == folder
    assert debian_space.versions(folder) == {"libamdhip64-7": "7.2.4-1"}
