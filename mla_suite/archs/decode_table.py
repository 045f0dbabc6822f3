"""decode's tuned table: per arch, which kernel serves a shape, and in which tiles of query rows.

A row of `ops/decode/tuned/<arch>.csv` decides problems of its kind up to its rows, batch and context. With kv_indices
the context is the mean: as many pages as they list over the batch. A caller who knows the total shortens a larger
buffer to it, `kv_indices[:total_pages]`; the whole buffer is taken for as long as its capacity. Rows belong to a
policy. `default` follows counts of these kernels (tools/count_crossovers.py) and measurements; `aiter-pr3003` is
the rule that AITER's pull request 3003 published for 32 heads x 4 query tokens in fp8. It compares two kernels of
others, so it is taken only where it is asked for:

>>> with decode_table.policy("aiter-pr3003"):
...     print(mla_suite.explain("decode", q, kv_cache, seq_lens, block_table, softmax_scale=192**-0.5))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mla_suite.archs import ArchSpec
from mla_suite.core import checks, dispatch, tuning
from mla_suite.core.tuning import Row
from mla_suite.ops.decode import Problem

POLICIES = ("default", "aiter-pr3003")
TRITON = "triton"
ANY = "any"
TILES = {"rows16": 16, "rows32": 32, "rows64": 64, "rows128": 128}
"""Names of tiles by their greatest number of query rows, which the column `use` may pick."""

FORMAT = tuning.Format(
    op="decode",
    exact=(
        tuning.Choice("policy", POLICIES),
        tuning.Choice("shape", (ANY, "h32q4")),  # heads and query tokens
        tuning.Choice("query", ("16bit", "fp8")),
        tuning.Choice("cache", ("16bit", "fp8")),
    ),
    near=(
        tuning.Integer("rows", 1, 1 << 20),  # of a sequence, q_len x heads; this and the next are upper limits
        tuning.Integer("batch", 1, 1 << 20),
        tuning.Integer("context", 1, 1 << 30),
    ),
    config=(tuning.Choice("use", (*TILES, TRITON)),),
    timed=False,
)


@contextmanager
def policy(name: str) -> Iterator[None]:
    """Within the block, and in this thread, calls follow the policy; those captured meanwhile keep what it chose."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    with checks.switched(dispatch.policy, name):
        yield


def row_of(arch: ArchSpec, problem: Problem) -> Row | None:
    """The row that decides which kernel serves a problem, in which tiles: by the lowest limit on rows that holds, then
    on batch, then on context; None without one.

    Batch-invariant problems see none, since they may see neither batch nor context. Counted rows are about the arch's
    own splits, so a plan or a number of splits leaves them out.
    """
    policy, rows = dispatch.policy.get(), tuning.rows(FORMAT, arch.name)
    own_splits = problem.planned or problem.num_splits > 0
    if not rows or problem.split_size > 0 or (policy == "default" and own_splits):
        return None
    shapes = (ANY, "h32q4") if (problem.heads, problem.q_len) == (32, 4) else (ANY,)
    kind = (width(problem.q_dtype), width(problem.kv_format))
    fitting = [
        row
        for row in rows
        if row.values["policy"] == policy
        and row.values["shape"] in shapes
        and (row.values["query"], row.values["cache"]) == kind
    ]
    asked = (problem.heads * problem.q_len, max(problem.batch, 1), max(problem.context, 1))
    for column, value in zip(FORMAT.near, asked, strict=True):
        limit = min(
            (int(row.values[column.name]) for row in fitting if int(row.values[column.name]) >= value), default=0
        )
        fitting = [row for row in fitting if row.values[column.name] == limit]
    return fitting[0] if fitting else None


def reason(row: Row) -> str:
    """The row and its limits, for `explain`."""
    limits = ", ".join(f"{column.name} up to {row.values[column.name]}" for column in FORMAT.near)
    return f"{row.provenance['kind']} row {row.position} of policy {row.values['policy']} ({limits})"


def width(kind: torch.dtype | str) -> str:
    """The table's word for a dtype or KV format, 16bit or fp8; the own name of what no row is about."""
    name = str(kind).removeprefix("torch.")
    if name.startswith(("fp8", "float8")):
        return "fp8"
    return "16bit" if name in ("bf16", "fp16", "bfloat16", "float16") else name
