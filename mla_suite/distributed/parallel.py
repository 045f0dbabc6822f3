"""The process groups of a layer, and the collectives that it needs, as functions that torch.compile traces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from mla_suite.core import checks
from mla_suite.core.register import WithoutBackward
from mla_suite.distributed import peer_memory
from mla_suite.ops.decode.reference import keys_of_rank

# torch 2.13 warns of the older name; an older torch may lack the newer one.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


class KeyShard(NamedTuple):
    """One rank's share of every sequence's keys: runs of `interleave` keys are dealt to the ranks in turn.

    The key at global position p belongs to rank (p // interleave) % world. interleave 1 deals single keys, and the
    page size deals whole pages. A rank keeps its keys in order, without gaps: its j-th key is local position j.
    """

    world: int = 1
    rank: int = 0
    interleave: int = 1

    def check(self) -> None:
        """Raise ValueError or TypeError, in one sentence, for a share that cannot exist."""
        for name, value in self._asdict().items():
            checks.whole("KeyShard", name, value)
        if self.world < 1 or not 0 <= self.rank < self.world or self.interleave < 1:
            raise ValueError(
                f"KeyShard: rank {self.rank} of {self.world} with interleave {self.interleave}; ranks are 0 to "
                "world - 1, and interleave is 1 or more"
            )

    def local_lens(self, lens: torch.Tensor) -> torch.Tensor:
        """Number of this rank's keys among the first `lens` keys of a sequence; any shape, lens' dtype."""
        return keys_of_rank(lens, *self)

    def owns(self, positions: torch.Tensor) -> torch.Tensor:
        """bool, positions' shape: whether the keys at these global positions lie on this rank."""
        return positions // self.interleave % self.world == self.rank

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Local positions of keys that this rank owns, by their global positions; positions' shape and dtype."""
        return positions // (self.world * self.interleave) * self.interleave + positions % self.interleave


@dataclass(frozen=True)
class Parallel:
    """How one layer is spread over tp_size x cp_size ranks.

    Rank r is tensor-parallel rank r // cp_size and context-parallel rank r % cp_size. Every rank holds the weights of
    heads / (tp_size x cp_size) heads; the ranks of one context-parallel group share out the keys of all their heads.

    tp_group, cp_group, all_group  names of the process groups, which functional collectives take; a type of its own in
                                   newer torch, a str in older
    """

    tp_size: int
    cp_size: int
    rank: int
    tp_group: Any
    cp_group: Any
    all_group: Any

    @classmethod
    def create(
        cls, *, tp_size: int = 1, cp_size: int = 1, device_type: str | None = None, timeout_s: float = 600.0
    ) -> Parallel:
        """Makes the groups from the initialised default process group, whose size must be tp_size x cp_size.

        device_type  "cuda" or "cpu"; by default "cuda" where a GPU is present
        timeout_s    seconds that GPUs of one host wait for each other in a collective, as the process group's timeout
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "Parallel.create: torch.distributed is not initialised; call torch.distributed.init_process_group "
                "first, or start the program with torchrun"
            )
        world = dist.get_world_size()
        if tp_size < 1 or cp_size < 1 or tp_size * cp_size != world:
            raise ValueError(
                f"Parallel.create: tp_size {tp_size} x cp_size {cp_size} is {tp_size * cp_size}, and the process "
                f"group has {world} ranks: give factors of {world}"
            )
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        mesh = init_device_mesh(device_type, (tp_size, cp_size), mesh_dim_names=("tp", "cp"))
        world_mesh = init_device_mesh(device_type, (world,), mesh_dim_names=("ranks",))
        tp_group, cp_group = (mesh.get_group(name).group_name for name in ("tp", "cp"))
        all_group = world_mesh.get_group("ranks").group_name
        if device_type == "cuda":
            for group in (all_group, cp_group):
                peer_memory.connect(group, timeout_s)
        return cls(tp_size, cp_size, dist.get_rank(), tp_group, cp_group, all_group)

    @property
    def world(self) -> int:
        return self.tp_size * self.cp_size

    @property
    def cp_rank(self) -> int:
        return self.rank % self.cp_size

    def shard(self, interleave: int = 1) -> KeyShard:
        """This rank's share of the keys; `interleave` keys in a row lie on one rank."""
        return KeyShard(self.cp_size, self.cp_rank, interleave)

    def sum_over_all(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks of the layer. backward() raises: a rank has the gradients of its own heads."""
        if self.world == 1:
            return x
        check_same_shape("sum", x, self.all_group)
        if peer_memory.serves_sum(self.all_group, x.numel() * x.element_size(), self.world):
            return torch.ops.mla_suite_ranks.peer_sum(x.contiguous(), str(self.all_group))
        total = functional.wait_tensor(functional.all_reduce(x, "sum", self.all_group))
        return WithoutBackward.apply(total.detach(), "ParallelMLA", total) if total.requires_grad else total

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., heads, dim] of every rank of the context-parallel group, joined over heads."""
        if self.cp_size == 1:
            return x
        everyone = gather(x, self.cp_group, self.cp_size)  # over dimension 0: torch 2.11 traces no other
        return everyone.movedim(0, -3).flatten(-3, -2)


def all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-to-all: slice s of x [ranks, ...] goes to rank s; slice s of the result comes from rank s."""
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), None, None, group))


def gather(x: torch.Tensor, group: Any, ranks: int) -> torch.Tensor:
    """x of every rank, [ranks, *x.shape]."""
    check_same_shape("gather", x, group)
    if peer_memory.serves(group, x.numel() * x.element_size()):
        return torch.ops.mla_suite_ranks.peer_gather(x.contiguous(), ranks, str(group))
    return functional.wait_tensor(_all_gather(x.contiguous(), 0, group)).view(ranks, *x.shape)


def initialise(timeout_s: float = 60.0) -> torch.device:
    """Joins the process group that torchrun describes and returns this rank's device: a GPU with NCCL, else gloo.

    timeout_s  seconds after which a collective that another rank does not join is an error
    """
    if not dist.is_torchelastic_launched():
        raise RuntimeError(
            "this process was not started by torchrun: run `torchrun --nproc-per-node 2 -m mla_suite demo --tp 2`"
        )
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    timeout = timedelta(seconds=timeout_s)
    if not on_gpu:
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)  # NCCL warns of a hang where it must guess
    return device


def check_agreement(facts: Mapping[str, Any], group: Any = None) -> None:
    """Raises ValueError on every rank, naming the facts in dispute, when the ranks were given different ones.

    facts  picklable values by name, such as shapes and options; call it once when a model is set up, since it meets
           all ranks on the host
    group  name of a process group; None is all ranks
    """
    process_group = None if group is None else distributed_c10d._resolve_process_group(group)
    ranks = dist.get_process_group_ranks(process_group)
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, dict(facts), group=process_group)
    names = sorted({name for own in everyone for name in own})
    disputes = []
    for name in names:
        values = [own.get(name, "missing") for own in everyone]
        if any(value != values[0] for value in values):
            said = (f"{value} on rank {rank}" for rank, value in zip(ranks, values, strict=True))
            disputes.append(f"{name} is {', '.join(said)}")
    if disputes:
        raise ValueError(f"the ranks disagree: {'; '.join(disputes)}; give all of them the same")


def check_same_shape(name: str, x: torch.Tensor, group: Any, **facts: Any) -> None:
    """On a CPU and in debug mode, outside of compiled code: what the ranks exchange has one shape and dtype.

    facts  what else all ranks must have been given alike, by name
    """
    if not torch.compiler.is_compiling() and (x.is_cpu or checks.debugging()):
        check_agreement({f"what they {name}": f"{tuple(x.shape)} {x.dtype}", **facts}, group)


def check_place(name: str, shard: KeyShard, group: Any) -> None:
    """ValueError where a share of the keys is not that of this process in the group; compiled code does not ask."""
    if torch.compiler.is_compiling():
        return
    process_group = distributed_c10d._resolve_process_group(group)
    world, rank = process_group.size(), process_group.rank()
    if (shard.world, shard.rank) != (world, rank):
        possible = f"this process is rank {rank} of the {world} of its group: give it KeyShard({world}, {rank}, ...)"
        checks.fail(name, "shard", f"is that of rank {shard.rank} of {shard.world}", possible)
