"""`torchrun -m mla_suite demo` runs on this machine, and says in one sentence per rank why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from ranks import forking

from mla_suite.__main__ import main
from mla_suite.cli import demo_model, demo_ranks
from mla_suite.distributed import ContextParallelCache


def sentences(command: Callable[[int], int], folder: Path) -> list[str]:
    """Returns what two failing ranks say, in the order of the ranks; `command` is called with a rank's number.

    The ranks are started without torchrun, which ends all others within 0.1 s of the first failure: a rank that it ends
    before its own sentence is written says nothing. As under torchrun, the process that starts them holds their store.
    """
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)  # which waits for nobody else
    described = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1",  # what is said does not depend on what is compiled, which takes a minute
    }
    logs = [folder / "0", folder / "1"]
    ranks = [
        forking().Process(target=_rank, args=(command, rank, described, str(log))) for rank, log in enumerate(logs)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300)
        assert all(rank.exitcode not in (0, None) for rank in ranks), [log.read_text() for log in logs]
    finally:
        for rank in ranks:
            rank.kill()
    return [line for log in logs for line in log.read_text().splitlines() if line.startswith("demo:")]


def _rank(command: Callable[[int], int], rank: int, described: dict[str, str], log: str) -> NoReturn:
    os.environ.update(described, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    with open(log, "w") as said:
        os.dup2(said.fileno(), 2)
    sys.exit(command(rank))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_decoder_over_two_ranks_agrees_with_its_textbook_forward(compiled):
    """Compiling takes two thirds of the time; test_parallel_layer.py compiles a layer that is spread."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--cp", "2", "--tokens", "2", "--layers", "1", "--kv-format", "fp32", "--json"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": str(int(not compiled))}
    command = [*torchrun, "-m", "mla_suite", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ranks"].startswith("1 tensor parallel x 2 context parallel, gloo on cpu")
    assert 0 < report["largest_logit_difference"] <= 1e-5


def three_ways(rank: int) -> int:
    return main(["demo", "--tp", "3"])


def test_a_wrong_number_of_ranks_is_one_sentence_on_every_rank(tmp_path: Path) -> None:
    said = sentences(three_ways, tmp_path)
    assert [sentence.split(":")[1] for sentence in said] == [" rank 0", " rank 1"]
    assert all("tp_size 3 x cp_size 1 is 3, and the process group has 2 ranks" in line for line in said)


def decoding(tokens: int) -> int:
    return int(demo_ranks.decode(1, 2, tokens, 1, "fp32", 0, quiet=False) is None)


def one_dies(rank: int) -> int:
    append, steps = ContextParallelCache.append, []

    def dying(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        return os._exit(3) if rank == 1 and len(steps) == 3 else append(*arguments, **options)

    ContextParallelCache.append = dying
    return decoding(3)


def test_a_rank_that_dies_between_steps_is_one_sentence_of_the_other(tmp_path: Path) -> None:
    (sentence,) = sentences(one_dies, tmp_path)
    assert sentence.startswith(
        "demo: rank 0: another rank ended or did not answer within 60 s; its own sentence says why"
    )


def disagree(rank: int) -> int:
    return decoding(3 + rank)


def test_ranks_that_disagree_say_so_in_one_sentence_each(tmp_path: Path) -> None:
    said = "the ranks disagree: tokens is 3 on rank 0, 4 on rank 1; give all of them the same"
    assert sentences(disagree, tmp_path) == [f"demo: rank {rank}: {said}" for rank in (0, 1)]


def test_without_torchrun_the_command_is_named(capsys):
    assert main(["demo", "--tp", "2"]) == 1
    assert "run `torchrun --nproc-per-node 2 -m mla_suite demo --tp 2`" in capsys.readouterr().err


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
