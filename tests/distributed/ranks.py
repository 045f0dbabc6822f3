"""Runs a function on several gloo ranks, each a process of its own, and brings its failures back."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(
    world: int, function: Callable[..., None], *arguments: Any, timeout_s: float = 120.0, on_gpus: bool = False
) -> None:
    """Calls function(rank, *arguments) on `world` ranks; an exception on any rank is raised here.

    on_gpus  NCCL with a GPU for each rank, the current one of its process, instead of gloo
    """
    processes.spawn(_member, (world, free_port(), timeout_s, on_gpus, function, arguments), nprocs=world)


def _member(
    rank: int, world: int, port: int, timeout_s: float, on_gpus: bool, function: Callable[..., None], arguments: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    if on_gpus:
        torch.cuda.set_device(rank)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
