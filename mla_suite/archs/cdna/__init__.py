"""Native kernels of the CDNA archs: each subclass says what its decode kernels are."""

from __future__ import annotations

from mla_suite.archs import sparse_attention
from mla_suite.archs.base import ArchKernels
from mla_suite.archs.cdna import decode
from mla_suite.archs.cdna.decode import MAX_ROWS, CdnaConfig
from mla_suite.archs.cdna.sparse_decode import CdnaSparseConfig
from mla_suite.archs.cdna.splits import plan_costs
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.combine import Problem as CombineProblem
from mla_suite.ops.decode import Problem as DecodeProblem
from mla_suite.ops.plan.scheduler import SchedulerCosts
from mla_suite.ops.sparse_decode import Problem as SparseDecodeProblem

PLAN_WAVES = (("search", (4, 4)), ("balanced", (8, 8)), ("uniform", (4, 4)))


class CdnaKernels(ArchKernels):
    """The kernels that gfx942 and gfx950 share; the choice of an attention kernel's instance is the arch's own."""

    wavefront = 64
    tile_rows = MAX_ROWS
    plan_waves = PLAN_WAVES
    append_has_runs = True
    config: type[CdnaConfig]
    sparse_config: type[CdnaSparseConfig]

    def fp8_query_rows(self, precision: str, page_size: int, joined: bool) -> int:
        """fp8 is multiplied as it is stored where the queries are fp8, too."""
        return 1

    def decode_config(self, problem: DecodeProblem, most: int) -> CdnaConfig:
        """The arch's instance of decode for a problem, in tiles of at most `most` query rows.

        It depends on the queries' shapes alone, but for `keeps_bf16_weights`.
        """
        query = decode.ELEMENTS[problem.q_dtype]
        cache = "fp8" if problem.kv_format in decode.FP8_KV_FORMATS.values() else problem.kv_format
        rows = decode.tile_rows(problem.heads * problem.q_len, most, problem.head_dim in decode.NARROW)
        fp8_weights = query == "fp8" and rows > decode.MAX_BF16_P_ROWS and not self.keeps_bf16_weights(problem, rows)
        return self.config(self.arch, query, cache, rows, problem.head_dim, problem.rope > 0, fp8_weights)

    def keeps_bf16_weights(self, problem: DecodeProblem, rows: int) -> bool:
        """Whether fp8 queries in tiles of so many rows keep softmax weights in bf16 for what else the problem has."""
        return False

    def decode(self, problem: DecodeProblem) -> Supported | Unsupported:
        return decode.supports(problem, self.arch, self.decode_config)

    def sparse_decode(self, problem: SparseDecodeProblem) -> Supported | Unsupported:
        kernels = self.sparse_config
        return sparse_attention.supports(problem, self.arch, kernels.for_problem, kernels.records)

    def combine(self, problem: CombineProblem) -> Supported | Unsupported:
        if problem.plus_inf_lse:
            return Unsupported("plus_inf_lse; its kernels give lse -inf where a row has no keys")
        return super().combine(problem)

    def scheduler_costs(self, num_q_rows: int) -> SchedulerCosts:
        """Costs for plan, whose partials a kernel of the whole device combines."""
        return plan_costs(self.arch, num_q_rows, MAX_ROWS)
