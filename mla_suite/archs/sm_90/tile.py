"""The tile of a CTA of decode and sparse_decode on sm_90, and its shared memory (csrc/sm_90/decode)."""

from __future__ import annotations

from mla_suite.archs import ArchSpec

BLOCK_M = 64  # query rows of a CTA: 64 x 512 results in fp32 are half of an SM's registers
BLOCK_N = 32  # keys of a stage: one copy, one Q K^T, one P V
OUT_BYTES = 8 * 4096  # the epilogue's buffers, which narrow rows have no stage for
P_BYTES = BLOCK_M * BLOCK_N * 2 + 3 * 4 * BLOCK_M + 128  # a buffer of P, with the statistics of its rows
REDUCE_BYTES = 5 * 4 * BLOCK_M + 8 * (4 + 4 * 4)  # of a cluster that reduces O: statistics of both splits, and barriers
REDUCE_FOUR_BYTES = 8 * (3 + 2 * 4)  # more barriers of one that reduces O of four splits
REGISTER_STEPS = {"tma": 28, "cp_async": 24, "selected": 22, "gathered": 28, "merged": 26, "fp8": 20, "rotated": 26}
"""How keys come -> 16-value steps of Q K^T whose queries lie in registers."""
RAW_STAGES = 4  # stages of e4m3 keys that scores and values are taken from


def block_bytes(width: int, stages: int, register_steps: int, beside_key: int = 0) -> int:
    """Shared memory of a CTA with a ring of `stages` for rows of `width` values and `beside_key` bytes more each.

    Rows lie in whole blocks of 64 values; two steps of the queries at least lie in shared memory, too.
    """
    keys = stages * BLOCK_N * (-(-width // 64) * 128 + beside_key)
    queries = max(width // 16 - register_steps, 2) * 2048
    return keys + queries + 2 * P_BYTES + 4 * 32 + 8 * (2 * stages + 2 * 2 + 2 * 4)


def fp8_scores_bytes(width: int, head_dim_v: int, stages: int, beside: int) -> int:
    """Shared memory of a CTA that has a ring of e4m3 keys, one of `stages` of their values, and queries in registers.

    `beside` is what a cluster needs.
    """
    values = stages * BLOCK_N * head_dim_v * 2
    alone = values + 2 * P_BYTES + 4 * 32 + 8 * (2 * stages + 2 * 2 + 2 * 4)
    return -(-(alone + beside) // 512) * 512 + RAW_STAGES * (BLOCK_N * width + 2 * 8)


def swap_ab_bytes(width: int, stages: int, rows: int) -> int:
    """Shared memory of a CTA that multiplies keys by at most `rows` query rows (csrc/sm_90/decode/swap_ab)."""
    keys = stages * 2 * (16 * width + 32)
    queries = rows * width * 2
    p = 2 * 128 * rows * 2
    of_rows = rows * (8 + 4 + 4 + 8 + 8 * 4)
    return keys + queries + p + of_rows + 4 * 32 + 8 * (2 * stages + 2 * 4)


def sparse_swap_ab_bytes(width: int, token_bytes: int, stages: int, groups: int, rows: int) -> int:
    """Shared memory of a CTA whose `groups` warpgroups multiply records by at most `rows` query rows.

    As csrc/sm_90/sparse_decode/swap_ab lays it out.
    """
    queries = rows * width * 2
    values = groups * 2 * 64 * 64 * 2
    p = groups * 2 * 64 * rows * 2
    keys = stages * 16 * token_bytes
    of_rows = rows * (groups * 4 * 4 + groups * 4 + 4 + 8)
    scratch = 4 * 80 + -(-4 * (stages + 1) // 8) * 8
    barriers = 8 * (2 * stages + 2 * 4 + 2 + groups)
    return -(-(queries + values + p + keys + of_rows + 4 * 32 + scratch + barriers) // 16) * 16


def few_heads_bytes(width: int, slot_bytes: int, slots: int, notes: int, warps: int) -> int:
    """Shared memory of a CTA of csrc/sm_90/sparse_decode/few_heads whose `warps` dequantise, by way of slots of four
    tokens, with `notes` bytes of lists and addresses each."""
    keys = 2 * 64 * width * 2
    queries, p = 16 * width * 2, 2 * 64 * 16 * 2
    producer = warps * (slots * slot_bytes + notes + 2 * 4)
    of_rows = 16 * (4 * 4 + 4 + 8)
    barriers = 8 * (2 * 2 + 2 * 4 + 2)
    return -(-(keys + queries + p + producer + of_rows + 4 * 32 + barriers) // 16) * 16


def groups_of(arch: ArchSpec, work_tiles: int, tiles: int) -> int:
    """Groups of `tiles` CTAs that walk the work tiles: one CTA on every SM, as far as there are work tiles."""
    return max(1, min(work_tiles, arch.compute_units // tiles))
