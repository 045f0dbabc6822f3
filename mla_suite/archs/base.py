"""Native kernels that every arch has: the base of each arch's `Kernels`."""

from __future__ import annotations

from mla_suite.archs import ArchSpec, append_kv, combine, plan
from mla_suite.archs.plan import PlanConfig
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.append_kv import Problem as AppendKvProblem
from mla_suite.ops.combine import Problem as CombineProblem
from mla_suite.ops.plan import Problem as PlanProblem


class CommonKernels:
    """combine, plan and append_kv, whose sources the archs share, with an arch's own figures.

    plan_waves         as in `PlanConfig`
    append_bulk_bytes  as in `AppendConfig`
    append_has_runs    append_kv has kernels of rows that are one scaled run
    """

    plan_waves: tuple[tuple[str, tuple[int, int]], ...]
    append_bulk_bytes = 0
    append_has_runs = False

    def __init__(self, arch: ArchSpec) -> None:
        self.arch = arch

    def fp8_query_rows(self, precision: str, page_size: int, joined: bool) -> int | None:
        return None

    def takes_query_parts(self, num_heads: int, q_len: int) -> bool:
        return False

    def widened_rows(self, num_heads: int) -> int:
        return 0

    def absorbed_prompt(self, head_dim: int, fp8: bool) -> int:
        return 0

    def combine(self, problem: CombineProblem) -> Supported | Unsupported:
        return combine.supports(problem, self.arch)

    def plan(self, problem: PlanProblem) -> Supported | Unsupported:
        return plan.supports(problem, PlanConfig(self.arch, self.plan_waves))

    def append_kv(self, problem: AppendKvProblem) -> Supported | Unsupported:
        return append_kv.supports(problem, self.arch, self.append_bulk_bytes, self.append_has_runs)
