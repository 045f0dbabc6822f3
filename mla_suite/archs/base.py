"""What each arch's `Kernels` answers, and the kernels that every arch has."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mla_suite.archs import ArchSpec, append_kv, combine, plan
from mla_suite.archs.plan import PlanConfig
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.append_kv import Problem as AppendKvProblem
from mla_suite.ops.combine import Problem as CombineProblem
from mla_suite.ops.plan import Problem as PlanProblem
from mla_suite.ops.plan.scheduler import SchedulerCosts


class ArchKernels(ABC):
    """The native kernels of one arch: a method for each operator that has one.

    An operator without a method has no native kernel there. A method takes the operator's `Problem` and answers with
    `Supported`, whose configuration has a method `spec(outputs, args)`, or with `Unsupported` and a reason in one
    sentence. It reads no tensor. The archs share the sources of combine, plan and append_kv.

    wavefront        lanes that the kernels are written for
    tile_rows        query rows that a workgroup of decode holds
    plan_waves       as in `PlanConfig`
    append_has_runs  append_kv has kernels of rows that are one scaled run
    """

    wavefront: int
    tile_rows: int
    plan_waves: tuple[tuple[str, tuple[int, int]], ...]
    append_has_runs = False

    def __init__(self, arch: ArchSpec) -> None:
        self.arch = arch

    @abstractmethod
    def scheduler_costs(self, num_q_rows: int) -> SchedulerCosts:
        """Costs for the load balancer of plan, with this number of query rows per sequence."""

    def fp8_query_rows(self, precision: str, page_size: int, joined: bool) -> int | None:
        """Rows of a sequence from which fp8 queries of an fp8 cache beat 16-bit ones, with decode's `precision`; None:
        none do. joined: the kernel that joins the two parts of a query rounds it, too, else one of its own does."""
        return None

    def takes_query_parts(self, num_heads: int, q_len: int) -> bool:
        """Whether decode over 16-bit rows, and sparse_decode, whose q_len is 1, over others, read 16-bit queries in two
        tensors (q_rope) where they lie."""
        return False

    def widened_rows(self, num_heads: int) -> int:
        """Records that convert_kv turns into bf16 rows in the time that a query token of sparse_decode gains by
        selecting 2,048 of such rows; 0: it gains nothing, or it is not known."""
        return 0

    def absorbed_prompt(self, head_dim: int, fp8: bool) -> int:
        """Query tokens up to which decode behind many cached keys of head_dim 16-bit or fp8 values takes less time than
        expanding them; 0: it is not known."""
        return 0

    def combine(self, problem: CombineProblem) -> Supported | Unsupported:
        return combine.supports(problem, self.arch)

    def plan(self, problem: PlanProblem) -> Supported | Unsupported:
        return plan.supports(problem, PlanConfig(self.arch, self.plan_waves))

    def append_kv(self, problem: AppendKvProblem) -> Supported | Unsupported:
        return append_kv.supports(problem, self.arch, has_runs=self.append_has_runs)
