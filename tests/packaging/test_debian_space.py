"""Debian's packages are fetched with the machine's own apt, kept, and where they cannot be had a sentence says why."""

import json
import subprocess
from types import SimpleNamespace

import debian_space
import pytest

RELEASE = 'PRETTY_NAME="Debian"\nVERSION_CODENAME=bookworm\nID=debian\n'
SPACE = debian_space.Space(("sid", "experimental"), {"libone": "1.2"}, {"libone-dev": "1.2"})


class Apt:
    """Answers for apt-get and dpkg-deb; `refused` is a word of the command that fails, with what it says."""

    def __init__(self, refused="", said=""):
        self.refused, self.said, self.commands = refused, said, []

    def run(self, command, cwd=None, env=None, **_):
        self.commands.append(command)
        if self.refused and self.refused in command:
            return subprocess.CompletedProcess(command, 100, "", self.said)
        shown = ""
        if "--print-uris" in command:
            shown = "'http://mirror.example/debian/dists/bookworm/InRelease' mirror_InRelease 0\n"
        elif command[1] in ("install", "download"):
            configured = env["APT_CONFIG"]
            with open(configured) as file:
                self.configuration = file.read()
            with open(configured.replace("apt.conf", "sources.list")) as file:
                self.sources = file.read()
            (cwd / f"{command[-1].split('=')[0]}.deb").touch()
        elif command[1] == "--extract":
            with open(f"{command[3]}/{command[2].rsplit('/', 1)[1]}.unpacked", "w"):
                pass
        elif command[1] == "--show":
            shown = f"{command[3].rsplit('/', 1)[1].removesuffix('.deb')} 1.2-3"
        return subprocess.CompletedProcess(command, 0, shown, "")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A Debian release with apt; returns a function that gives it another Apt, release or no programs at all."""

    def make(apt=None, release=RELEASE, programs=True):
        apt = apt or Apt()
        released = tmp_path / "os-release"
        released.write_text(release)
        monkeypatch.setattr(debian_space, "subprocess", SimpleNamespace(run=apt.run, CompletedProcess=object))
        monkeypatch.setattr(debian_space, "OS_RELEASE", released)
        monkeypatch.setattr(debian_space.shutil, "which", lambda name: f"/usr/bin/{name}" if programs else None)
        monkeypatch.setattr(debian_space.platform, "machine", lambda: "x86_64")
        monkeypatch.setitem(debian_space.SPACES, "one", SPACE)
        monkeypatch.setenv("MLA_SUITE_SPACES", str(tmp_path / "spaces"))
        return apt

    return make


def test_packages_are_unpacked_once(machine):
    apt = machine()
    folder = debian_space.fetch("one")
    assert sorted(path.name for path in folder.iterdir()) == [
        "libone-dev.deb.unpacked",
        "libone.deb.unpacked",
        "packages.json",
    ]
    assert debian_space.versions(folder) == {"libone": "1.2-3", "libone-dev": "1.2-3"}
    assert apt.sources.splitlines() == [
        "deb [arch=amd64] http://mirror.example/debian sid main",
        "deb [arch=amd64] http://mirror.example/debian experimental main",
    ]
    assert 'Dir::State::status "' in apt.configuration, "what this machine has installed is not asked"
    asked = len(apt.commands)
    assert debian_space.fetch("one") == folder
    assert len(apt.commands) == asked, "a user space that is there is used"
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".fetching")]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (dict(programs=False), "with apt-get and dpkg-deb on x86-64, which this machine lacks"),
        (
            dict(release="ID=fedora\nVERSION_CODENAME=x\n"),
            "Debian's packages, and this machine is not a Debian release",
        ),
        (dict(release=RELEASE.replace("bookworm", "other")), "this machine's apt names no mirror of other"),
        (dict(apt=Apt("update", "E: no configuration")), "this machine's apt names no mirror of bookworm"),
        (
            dict(apt=Apt("install", "E: Version '1.2*' for 'libone' was not found")),
            r"libone=1.2\* cannot be had from sid and experimental: Version '1.2\*' for 'libone' was not found",
        ),
        (dict(apt=Apt("download", "")), r"libone-dev=1.2\* cannot be had .*: apt-get ended with 100"),
    ],
)
def test_a_sentence_says_why_packages_cannot_be_had(machine, given, why):
    machine(**given)
    with pytest.raises(debian_space.Unavailable, match=why):
        debian_space.fetch("one")


def test_a_fetch_that_failed_is_begun_again(machine):
    machine(Apt("install", "E: no"))
    with pytest.raises(debian_space.Unavailable):
        debian_space.fetch("one")
    machine()
    assert json.loads((debian_space.fetch("one") / "packages.json").read_text())
