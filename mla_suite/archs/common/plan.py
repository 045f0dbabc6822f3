"""plan on native kernels: two launches for a balanced plan, one for a uniform one; nothing is read on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs.common.combine import missing
from mla_suite.build.params import pack_numbers, packer
from mla_suite.core.dispatch import Launch, Supported, Unsupported
from mla_suite.launch import Buffer, bind
from mla_suite.ops.plan import PlanArgs, Problem
from mla_suite.ops.plan import metadata as words
from mla_suite.ops.plan.dealing import candidates
from mla_suite.ops.plan.metadata import Word
from mla_suite.ops.plan.scheduler import scheduler_costs

MAX_SEQUENCES = 2048  # whose prefix sum a workgroup keeps in shared memory
FEW = 160  # sequences: batches up to this size take the first number of waves of WAVES, more the second
_NAMES = {word: word.name.lower() for word in Word if word not in (Word.WORK_TILES_USED, Word.PARTIAL_ROWS)}


@dataclass(frozen=True)
class PlanConfig:
    """The kernels of plan on one arch.

    waves  step -> waves of a workgroup for up to FEW sequences, and for more
    """

    arch: ArchSpec = field(repr=False)
    waves: tuple[tuple[str, tuple[int, int]], ...]

    def waves_of(self, step: str, batch: int) -> int:
        return dict(self.waves)[step][batch > FEW]

    def instance(self, step: str, batch: int) -> str:
        return f"plan_step-{step}_waves-{self.waves_of(step, batch)}"

    def threads(self, step: str, batch: int) -> int:
        return self.waves_of(step, batch) * self.arch.wavefront

    def prepare(self, outputs: tuple[torch.Tensor, ...], args: PlanArgs) -> Launch:
        """The launches of the operator, one after another."""
        numbers, steps = _prepare(
            self,
            args.seq_lens.shape[0],
            args.num_heads * args.max_seqlen_q,
            args.num_sm_parts,
            args.max_seqlen_kv,
            args.num_splits,
            args.split_size,
        )
        enqueues = [
            bind("plan", s.instance, args.seq_lens, s.grid, s.threads, 0, partial(_buffers, s.name), overlap=True)
            for s in steps
        ]

        def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
            (plan,) = outputs
            seq_lens, cu_seqlens_q = tensors
            cu_seqlens_at = 0 if cu_seqlens_q is None else cu_seqlens_q.data_ptr()
            params = _pack_pointers(seq_lens.data_ptr(), cu_seqlens_at, plan.data_ptr()) + numbers
            given = plan, seq_lens, cu_seqlens_q
            for enqueue in enqueues:
                enqueue(params, given)

        return launch


def _steps(num_splits: int, split_size: int) -> tuple[str, ...]:
    return ("uniform",) if num_splits > 0 or split_size > 0 else ("search", "balanced")


def supports(problem: Problem, config: PlanConfig) -> Supported | Unsupported:
    if problem.window:
        return Unsupported("window_left; its kernels plan all keys of a sequence")
    if problem.batch < 1 or problem.batch > MAX_SEQUENCES:
        return Unsupported(f"{problem.batch} sequences; it takes 1 to {MAX_SEQUENCES}")
    steps = _steps(problem.num_splits, problem.split_size)
    answer = Supported(config, f"{' then '.join(steps)}, {len(steps)} launch{'es' if len(steps) > 1 else ''}")
    return missing(config.arch, *(config.instance(step, problem.batch) for step in steps)) or answer


_POINTERS = ("seq_lens", "cu_seqlens_q", "plan")
_pack_pointers = packer(len(_POINTERS)).pack


class _Step(NamedTuple):
    """One launch."""

    name: str
    instance: str
    grid: tuple[int, int, int]
    threads: int


@lru_cache(maxsize=1024)
def _prepare(
    config: PlanConfig,
    batch: int,
    num_q_rows: int,
    num_sm_parts: int,
    max_seqlen_kv: int,
    num_splits: int,
    split_size: int,
) -> tuple[bytes, tuple[_Step, ...]]:
    """The parameters after the pointers, and the launches: equal calls share them."""
    sizes = dict(max_seqlen_kv=max_seqlen_kv, num_splits=num_splits, split_size=split_size)
    layout = words.layout_for(batch, num_sm_parts, **sizes)
    header = layout.header(**sizes)
    splits = int(layout.work_tile_capacity) // batch if num_splits or split_size else 0
    costs = scheduler_costs(config.arch, num_q_rows)
    dealt = 0 if splits > 0 else candidates(costs, batch, num_sm_parts)
    threads = config.threads("uniform", batch)
    workgroups = min(-(-batch * splits // threads), config.arch.compute_units) if splits > 0 else 1
    numbers = pack_numbers(
        "plan",
        _POINTERS,
        work_tile_cost=costs.tile,
        partial_cost=costs.partial_rows,
        shared_cost=costs.partial,
        splits=splits,
        workgroups=workgroups,
        dealt=dealt,
        **{name: header[word] for word, name in _NAMES.items()},
    )
    groups = {"uniform": workgroups, "search": num_sm_parts + dealt, "balanced": 1}
    steps = tuple(
        _Step(step, config.instance(step, batch), (groups[step], 1, 1), config.threads(step, batch))
        for step in _steps(num_splits, split_size)
    )
    return numbers, steps


def _buffers(
    step: str, plan: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> Iterator[Buffer]:
    yield Buffer("seq_lens", seq_lens, "r")
    if cu_seqlens_q is not None:
        yield Buffer("cu_seqlens_q", cu_seqlens_q, "r")
    # The second step reads what the first left in the words of the work tiles.
    yield Buffer("plan", plan, {"search": "w", "balanced": "rw", "uniform": "all"}[step])
