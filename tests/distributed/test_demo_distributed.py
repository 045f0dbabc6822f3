"""`torchrun -m mla_suite demo` runs on this machine, and says in one sentence per rank why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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


DIES = """
import os, sys
from mla_suite.cli import demo_distributed
from mla_suite.distributed import Parallel
create = Parallel.create
def dying(**options):
    parallel = create(**options)
    return os._exit(3) if parallel.rank == 1 else parallel
Parallel.create = dying
sys.exit(demo_distributed.run(2, 1, tokens=1, seed=0, as_json=False))
"""


def test_a_rank_that_dies_is_one_sentence_of_the_other(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(tmp_path / "dies.py")], capture_output=True, text=True, env=environment, timeout=300
    )
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("demo:")]
    assert sentence.startswith(
        "demo: rank 0: another rank ended or did not answer within 60 s; its own sentence says why"
    )
    assert done.returncode != 0


def test_without_torchrun_the_command_is_named(capsys):
    assert main(["demo", "--tp", "2"]) == 1
    assert "run `torchrun --nproc-per-node 2 -m mla_suite demo --tp 2`" in capsys.readouterr().err
