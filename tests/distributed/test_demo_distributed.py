"""`torchrun -m mla_suite demo` runs on this machine, and says in one sentence per rank why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_suite.__main__ import main


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mla_suite", "demo"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=300)


def test_a_layer_over_two_ranks_agrees_with_the_whole_layer():
    done = torchrun("--cp", "2", "--tokens", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ranks"].startswith("1 tensor parallel x 2 context parallel, gloo on cpu")
    assert 0 < report["largest relative difference"] <= 1e-5


def test_a_wrong_number_of_ranks_is_one_sentence_on_every_rank():
    done = torchrun("--tp", "3")
    sentences = [line for line in done.stderr.splitlines() if line.startswith("demo:")]
    assert done.returncode != 0
    assert sorted(sentence.split(":")[1] for sentence in sentences) == [" rank 0", " rank 1"]
    assert all("tp_size 3 x cp_size 1 is 3, and the process group has 2 ranks" in line for line in sentences)


PROGRAM = """
import os, sys
from mla_suite.cli import demo_distributed
from mla_suite.distributed import ContextParallelCache
rank, tokens, append, steps = int(os.environ["RANK"]), 3, ContextParallelCache.append, []
{fault}
sys.exit(demo_distributed.run({tp}, {cp}, tokens=tokens, seed=0, as_json=False))
"""
DIES = """
def dying(*arguments, **options):
    steps.append(1)
    return os._exit(3) if rank == 1 and len(steps) == 3 else append(*arguments, **options)
ContextParallelCache.append = dying
"""
BOTH = pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)], ids=["tp", "cp"])


def sentences(folder: Path, fault: str, tp: int, cp: int) -> list[str]:
    """Returns what the ranks of a demo with a fault say, in the order of the ranks."""
    (folder / "faulty.py").write_text(PROGRAM.format(fault=fault, tp=tp, cp=cp))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(folder / "faulty.py")], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode != 0
    return sorted(line for line in done.stderr.splitlines() if line.startswith("demo:"))


@BOTH
def test_a_rank_that_dies_between_steps_is_one_sentence_of_the_other(tmp_path, tp, cp):
    (sentence,) = sentences(tmp_path, DIES, tp, cp)
    assert sentence.startswith(
        "demo: rank 0: another rank ended or did not answer within 60 s; its own sentence says why"
    )


@BOTH
def test_ranks_that_disagree_say_so_in_one_sentence_each(tmp_path, tp, cp):
    said = "the ranks disagree: tokens is 3 on rank 0, 4 on rank 1; give all of them the same"
    assert sentences(tmp_path, "tokens += rank", tp, cp) == [f"demo: rank {rank}: {said}" for rank in (0, 1)]


def test_without_torchrun_the_command_is_named(capsys):
    assert main(["demo", "--tp", "2"]) == 1
    assert "run `torchrun --nproc-per-node 2 -m mla_suite demo --tp 2`" in capsys.readouterr().err
