"""A command whose output is a pipe says by lines how far it is; one that cannot write its output says so in a sentence;
one that Ctrl-C ends has saved what it measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

COMMAND = """
import runpy, signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
runpy.run_module("mla_suite", run_name="__main__", alter_sys=True)
"""


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", COMMAND, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, bufsize=1
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_with(words: str, stream: IO[str] | None) -> str:
    assert stream is not None
    read = []
    for line in stream:
        read.append(line)
        if words in line:
            return line
    raise AssertionError(f"{words!r} is not in {''.join(read)}")


def test_an_interrupted_bench_has_saved_what_it_measured(tmp_path):
    table = tmp_path / "table.csv"
    options = ["--set", "flashmla", "--plan", "without", "--set", "quick", "--csv", str(table)]
    with started("bench", "--device", "cpu", "--shapes", "b2-h16-q1-kv64-", "b1-h16-q1-kv1024-", *options) as process:
        line_with("b1-h16-q1-kv1024-p64-bf16 reference", process.stdout)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert " s  decode-b1-h16-q1-kv1024-p64-bf16" in said, "progress"
    assert said.endswith("bench: stopped\n")
    assert ",b1-h16-q1-kv1024-p64-bf16,reference," in table.read_text()


@pytest.mark.parametrize("command", ["formats", "explain"], ids=["rich", "print"])
@pytest.mark.parametrize(
    ("redirection", "sentence"),
    [
        (">&-", "the standard output is closed; send it to a file or to /dev/null\n"),
        (">/dev/full", "{}: the output cannot be written (No space left on device)\n"),
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(command, redirection, sentence):
    line = f'"$0" -m mla_suite {command} {redirection}'
    done = subprocess.run(["sh", "-c", line, sys.executable], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, sentence.format(command))


@pytest.mark.full
def test_a_build_says_how_far_it_is(tmp_path):
    words = ("build", "--arch", "gfx942", "--kernel", "append_kv", "--out", str(tmp_path))
    with started(*words) as process:
        printed, said = process.communicate(timeout=300)
    if "no compiler" in said:
        pytest.skip(said)
    assert process.returncode == 0, said
    lines = [line.split("  ")[-1] for line in said.splitlines() if "compiling" in line]
    steps = lines[-1].split()[-1]
    assert lines[0] == f"compiling 1 of {steps}"
    assert lines[-1] == f"compiling {steps} of {steps}"
    assert int(steps) > 1
    assert f"{tmp_path}: 2 for gfx942" in printed
