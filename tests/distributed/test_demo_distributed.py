"""`torchrun -m mla_suite demo` runs on this machine, and says in one sentence per rank why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import as_torchrun

from mla_suite.__main__ import main
from mla_suite.cli import demo_model, demo_ranks
from mla_suite.distributed import ContextParallelCache


def sentences(command: Callable[[], int], folder: Path) -> list[str]:
    """Returns what two failing ranks say, in the order of the ranks."""
    ended = as_torchrun(folder, command)
    assert all(status != 0 for status, *_ in ended), ended
    return [line for *_, errors in ended for line in errors.splitlines() if line.startswith("demo:")]


OPTIONS = ("demo", "--cp", "2", "--tokens", "2", "--layers", "1", "--kv-format", "fp32", "--json")


def command() -> int:
    return main(list(OPTIONS))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_decoder_over_two_ranks_agrees_with_its_textbook_forward(compiled, tmp_path):
    """Compiling takes two thirds of the time; test_parallel_layer.py compiles a layer that is spread. The ranks that
    compile are torchrun's own, and the others are described as it does."""
    if compiled:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [*torchrun, "-m", "mla_suite", *OPTIONS]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
        status, printed, errors = done.returncode, done.stdout, done.stderr
    else:
        (status, printed, errors), (other, silent, _) = as_torchrun(tmp_path, command)
        assert (other, silent) == (0, ""), "the first rank speaks"
    assert status == 0, errors
    report = json.loads(printed)
    assert report["ranks"].startswith("1 tensor parallel x 2 context parallel, gloo on cpu")
    assert 0 < report["largest_logit_difference"] <= 1e-5


def three_ways() -> int:
    return main(["demo", "--tp", "3"])


def test_a_wrong_number_of_ranks_is_one_sentence_on_every_rank(tmp_path):
    said = sentences(three_ways, tmp_path)
    assert [sentence.split(":")[1] for sentence in said] == [" rank 0", " rank 1"]
    assert all("tp_size 3 x cp_size 1 is 3, and the process group has 2 ranks" in line for line in said)


def decoding(tokens: int) -> int:
    return int(demo_ranks.decode(1, 2, tokens, 1, "fp32", 0, quiet=False) is None)


def one_dies() -> int:
    append, steps = ContextParallelCache.append, []

    def dying(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        return os._exit(3) if os.environ["RANK"] == "1" and len(steps) == 3 else append(*arguments, **options)

    ContextParallelCache.append = dying
    return decoding(3)


def test_a_rank_that_dies_between_steps_is_one_sentence_of_the_other(tmp_path):
    (sentence,) = sentences(one_dies, tmp_path)
    assert sentence.startswith(
        "demo: rank 0: another rank ended or did not answer within 60 s; its own sentence says why"
    )


def disagree() -> int:
    return decoding(3 + int(os.environ["RANK"]))


def test_ranks_that_disagree_say_so_in_one_sentence_each(tmp_path):
    said = "the ranks disagree: tokens is 3 on rank 0, 4 on rank 1; give all of them the same"
    assert sentences(disagree, tmp_path) == [f"demo: rank {rank}: {said}" for rank in (0, 1)]


def test_the_first_line_says_what_the_ranks_run_on(capsys, monkeypatch):
    """One rank, which is its own store; the layer itself is not run."""
    described = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
    described |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "test"}
    for name, value in described.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo_model, "decode", lambda *sizes, **options: {"largest_logit_difference": 0.0})
    report = demo_ranks.decode(1, 1, 1, 1, "fp32", 0, quiet=False)
    used = "CPU, 1 ranks over gloo; they would use a GPU each if this host had as many"
    assert capsys.readouterr().out.startswith(f"device: {used}")
    assert report is not None
    assert report["device"].startswith(used)
    assert demo_ranks.decode(1, 1, 1, 1, "fp32", 0, quiet=True) == report
    assert capsys.readouterr().out == ""
