"""plan on native kernels: two launches for a balanced plan, one for a uniform one; nothing is read on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.launch import missing
from mla_suite.launch.spec import CallSpec, Input, LaunchSpec, Output, Slot
from mla_suite.ops.plan import PlanArgs, Problem
from mla_suite.ops.plan import metadata as words
from mla_suite.ops.plan.dealing import candidates
from mla_suite.ops.plan.metadata import Word
from mla_suite.ops.plan.scheduler import scheduler_costs

MAX_SEQUENCES = 2048  # whose prefix sum a workgroup keeps in shared memory
FEW = 160  # sequences: batches up to this size take the first number of waves of WAVES, more the second
SEQ_LENS, CU_SEQLENS_Q, PLAN = Input(0), Input(1), Output(0)
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

    def spec(self, outputs: tuple[torch.Tensor, ...], args: PlanArgs) -> CallSpec:
        """The launches of the operator, which take the same parameters."""
        numbers, groups = numbers_and_groups(
            self,
            args.seq_lens.shape[0],
            args.num_heads * args.max_seqlen_q,
            args.num_sm_parts,
            args.max_seqlen_kv,
            args.num_splits,
            args.split_size,
            args.max_seqlen_q,
            args.window_left,
        )
        batch, pointers = args.seq_lens.shape[0], dict[str, Slot](seq_lens=SEQ_LENS, cu_seqlens_q=None, plan=PLAN)
        if args.cu_seqlens_q is not None:
            pointers["cu_seqlens_q"] = CU_SEQLENS_Q
        launches = []
        for step in steps(args.num_splits, args.split_size):
            kernel, threads = self.instance(step, batch), self.threads(step, batch)
            fills = ("plan",) if step == "uniform" else ()
            launch = LaunchSpec(kernel, (groups[step], 1, 1), threads, 0, True, "plan", numbers, pointers, fills=fills)
            launches.append(launch)
        return CallSpec(tuple(launches))


def steps(num_splits: int, split_size: int) -> tuple[str, ...]:
    """The launches of a call, by the names that their instances have."""
    return ("uniform",) if num_splits > 0 or split_size > 0 else ("search", "balanced")


def supports(problem: Problem, config: PlanConfig) -> Supported | Unsupported:
    if problem.batch < 1 or problem.batch > MAX_SEQUENCES:
        return Unsupported(f"{problem.batch} sequences; it takes 1 to {MAX_SEQUENCES}")
    names = steps(problem.num_splits, problem.split_size)
    answer = Supported(config, f"{' then '.join(names)}, {len(names)} launch{'es' if len(names) > 1 else ''}")
    return missing(config.arch, *(config.instance(step, problem.batch) for step in names)) or answer


@lru_cache(maxsize=1024)
def numbers_and_groups(
    config: PlanConfig,
    batch: int,
    num_q_rows: int,
    num_sm_parts: int,
    max_seqlen_kv: int,
    num_splits: int,
    split_size: int,
    q_len: int,
    window_left: int,
) -> tuple[dict[str, int | float], dict[str, int]]:
    """(the numbers among the parameters, workgroups of each step); nothing is to be changed in them."""
    sizes = dict(max_seqlen_kv=max_seqlen_kv, num_splits=num_splits, split_size=split_size)
    layout = words.layout_for(batch, num_sm_parts, **sizes)
    header = layout.header(**sizes)
    splits = int(layout.work_tile_capacity) // batch if num_splits or split_size else 0
    costs = scheduler_costs(config.arch, num_q_rows)
    dealt = 0 if splits > 0 else candidates(costs, batch, num_sm_parts)
    threads = config.threads("uniform", batch)
    workgroups = min(-(-batch * splits // threads), config.arch.compute_units) if splits > 0 else 1
    numbers: dict[str, int | float] = dict(
        work_tile_cost=costs.tile,
        partial_cost=costs.partial_rows,
        shared_cost=costs.partial,
        q_len=q_len,
        window_left=window_left,
        splits=splits,
        workgroups=workgroups,
        dealt=dealt,
        **{name: header[word] for word, name in _NAMES.items()},
    )
    return numbers, {"uniform": workgroups, "search": num_sm_parts + dealt, "balanced": 1}
