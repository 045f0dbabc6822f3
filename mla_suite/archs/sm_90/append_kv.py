"""append_kv on sm_90: records that scale all values of a row have kernels of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_suite.archs import ArchSpec
from mla_suite.archs import append_kv as common
from mla_suite.archs.append_kv import MAX_TOKENS, WAVES, AppendConfig
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.launch import missing
from mla_suite.ops.append_kv import Problem

BULK_BYTES = 90_112  # dynamic shared memory of the bulk kernel, as csrc/sm_90/append_kv/append_bulk.hpp has it
RECORD_BULK_BYTES = 81_920  # the same of records
RECORDS = {
    **dict.fromkeys(("v41", "v41_interleaved", "v41_vllm"), "v41"),
    **dict.fromkeys(("v41_fp4", "v41_fp4_interleaved"), "v41_fp4"),
    "v32_nope": "v32nope",
}
"""kv_format -> its type in csrc/sm_90/append_kv/record_row.hpp."""
MAX_ROPE = 64  # values


@dataclass(frozen=True)
class RecordConfig(AppendConfig):
    """The kernel for one of RECORDS."""

    record: str = ""

    @property
    def bulk(self) -> bool:
        return self.tokens > WAVES

    @property
    def instance(self) -> str:
        return f"append_records_format-{self.record}_tokens-{MAX_TOKENS if self.bulk else WAVES}"


def supports(problem: Problem, arch: ArchSpec) -> Supported | Unsupported:
    """The kernel of the record where the rows are as it takes them; V4.1's have no other."""
    record = RECORDS.get(problem.kv_format)
    why = None if record is None else _unfit(problem, record)
    if record is None or (why is not None and record == "v32nope"):
        return common.supports(problem, arch, BULK_BYTES)
    if why is not None:
        return why
    tokens = min(max(-(-problem.tokens // arch.compute_units), 1), MAX_TOKENS)  # up to WAVES a warp writes one
    config = RecordConfig(arch, tokens, RECORD_BULK_BYTES, record)
    answer = Supported(config, f"{config.instance}, {config.tokens} to a workgroup")
    return missing(arch, config.instance) or answer


def _unfit(problem: Problem, record: str) -> Unsupported | None:
    """Why the record's kernel cannot take a problem; None when it can."""
    taken = f"the kernel of {problem.kv_format} records takes"
    if problem.dtype != torch.bfloat16:
        return Unsupported(f"kv_c is {problem.dtype}; {taken} bfloat16")
    if problem.latent % 8 or problem.rope > MAX_ROPE or problem.rope % 2:
        given = f"rows of {problem.latent} + {problem.rope} values"
        return Unsupported(f"{given}; {taken} latents in eights and at most {MAX_ROPE} others, in pairs")
    if problem.rotated and record == "v32nope":
        return Unsupported(f"cos_sin is given; {taken} rows that are not rotated")
    if not problem.vectors or problem.alignment < 16:
        needed = "kv_c and kv_cache on 16 bytes, k_pe and cos_sin on two values"
        return Unsupported(f"rows lie where loads of 16 bytes do not reach them; {taken} {needed}")
    return None
