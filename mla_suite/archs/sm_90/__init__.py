"""Native kernels of sm_90 (H100, H200, H20)."""

from __future__ import annotations

from mla_suite.archs.attention import WIDTHS
from mla_suite.archs.base import ArchKernels
from mla_suite.archs.sm_90 import append_kv, convert_kv, costs, decode, sparse_decode, tensor_maps
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.append_kv import Problem as AppendKvProblem
from mla_suite.ops.convert_kv import Problem as ConvertKvProblem
from mla_suite.ops.decode import Problem as DecodeProblem
from mla_suite.ops.plan.scheduler import SchedulerCosts
from mla_suite.ops.sparse_decode import Problem as SparseDecodeProblem

# On an H200 five warps, a split a lane for 132 SM parts, are the fastest as long as each sequence has a thread, too.
PLAN_WAVES = (("search", (5, 8)), ("balanced", (5, 16)), ("uniform", (8, 8)))
# With the kernel that quantises them, fp8 queries of 128 rows take an H100 0.96 to 0.99 of the time of 16-bit ones from
# 32 sequences on and 1.01 to 1.07 with fewer; of 64 rows they gain with 128 sequences alone. Where scores may be sums
# of fp8 products, those of 64 rows take 0.89 to 0.96, and with 1,024 keys 1.03 (F13 in decode/PERF.md).
FP8_QUERY_ROWS = {"full": 128, "fp8": 64}

# By keys of 16-bit rows, and of e4m3 ones. In vLLM's engine on an H200 a layer with a prompt of 256 tokens of 128 heads
# behind 16,384 keys in bf16 took 0.72 of what it does with expanded keys, with one of 512 tokens 1.16; of 16 heads 0.79
# and 0.89 behind 1,024. Over e4m3 a pair of a token and a key took 0.51 ns absorbed and 0.12 expanded, and a key took
# 74 ns to expand.
ABSORBED_PROMPT = {False: 384, True: 192}

# By the fewest heads. convert_kv takes an H200 0.56 ns for a record of V3.2. Over 65,536 of them a prompt's token takes
# less time in bf16 rows, by 0.29 us with 128 heads, 0.19 with 32 and 0.08 with 16. Half as many rows as that pays for
# leave room for the launch.
WIDENED_ROWS = ((32, 170), (1, 70))


class Kernels(ArchKernels):
    wavefront = 32
    tile_rows = BLOCK_M
    plan_waves = PLAN_WAVES

    def fp8_query_rows(self, precision: str, page_size: int, joined: bool) -> int | None:
        """In pages of other sizes scores are in full precision.

        With a kernel of its own that rounds queries of 128 heads, a step of SGLang's took an H200 0.99 as long at 128
        sequences and 1.00 at 1 and 32, and results moved by 2.3 % of their norm.
        """
        exact = precision == "full" or page_size % BLOCK_N != 0
        if exact and not joined:
            return None
        return FP8_QUERY_ROWS["full" if exact else precision]

    def absorbed_prompt(self, head_dim: int, fp8: bool) -> int:
        return ABSORBED_PROMPT[fp8] if head_dim in WIDTHS else 0

    def takes_query_parts(self, num_heads: int, q_len: int) -> bool:
        return tensor_maps.box_by_token(num_heads, q_len) is not None

    def widened_rows(self, num_heads: int) -> int:
        return next(rows for fewest, rows in WIDENED_ROWS if num_heads >= fewest)

    def decode(self, problem: DecodeProblem) -> Supported | Unsupported:
        return decode.supports(problem, self.arch)

    def sparse_decode(self, problem: SparseDecodeProblem) -> Supported | Unsupported:
        return sparse_decode.supports(problem, self.arch)

    def append_kv(self, problem: AppendKvProblem) -> Supported | Unsupported:
        return append_kv.supports(problem, self.arch)

    def convert_kv(self, problem: ConvertKvProblem) -> Supported | Unsupported:
        return convert_kv.supports(problem, self.arch)

    def scheduler_costs(self, num_q_rows: int) -> SchedulerCosts:
        return costs.scheduler_costs(num_q_rows)
