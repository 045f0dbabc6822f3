"""Runs a function on several gloo ranks, each a process of its own, and brings its failures back."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def forking() -> BaseContext:
    """Processes that fork from a server have what it imported: importing torch takes longer than most tests do.

    The first collective of a process imports torch._dynamo, which is as much again.
    """
    imported = ["torch.distributed", "torch._dynamo", "mla_suite.distributed", "mla_suite.models", "pytest"]
    multiprocessing.set_forkserver_preload(imported)
    return multiprocessing.get_context("forkserver")


def on_ranks(
    world: int, function: Callable[..., None], *arguments: Any, timeout_s: float = 120.0, on_gpus: bool = False
) -> None:
    """Calls function(rank, *arguments) on `world` ranks; an exception on any rank is raised here.

    The ranks find each other by a file, since a port that was free may be taken before a rank listens on it.

    timeout_s  of the process group; it begins when every rank has started, however long that took
    on_gpus    NCCL with a GPU for each rank, the current one of its process, instead of gloo
    """
    how = "spawn" if on_gpus else forking().get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(
            _member, (world, folder, timeout_s, on_gpus, function, arguments), nprocs=world, start_method=how
        )


def _member(
    rank: int, world: int, folder: str, timeout_s: float, on_gpus: bool, function: Callable[..., None], arguments: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(world))
    if on_gpus:
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder, "store")), world)
    store.set(f"rank {rank} has started", "")
    store.wait([f"rank {other} has started" for other in range(world)])
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=world, timeout=limit)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def as_torchrun(folder: Path, command: Callable[..., int], *arguments: Any) -> list[tuple[int, str, str]]:
    """The status, output and errors of two ranks that call command(*arguments), each a process that torchrun describes.

    torchrun itself ends all others within 0.1 s of the first failure: a rank that it ends before its own sentence is
    written says nothing. As under torchrun, the process that starts them holds their store.
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
    logs = [(folder / f"out {rank}", folder / f"err {rank}") for rank in range(2)]
    ranks = [
        forking().Process(target=_described, args=(described, rank, own, command, arguments))
        for rank, own in enumerate(logs)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [
        (rank.exitcode, out.read_text(), errors.read_text()) for rank, (out, errors) in zip(ranks, logs, strict=True)
    ]


def _described(
    described: dict[str, str], rank: int, logs: tuple[Path, Path], command: Callable[..., int], arguments: Any
) -> NoReturn:
    os.environ.update(described, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    for number, log in enumerate(logs, start=1):
        with log.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.exit(command(*arguments))
