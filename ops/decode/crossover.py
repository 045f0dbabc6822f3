"""Crossovers: up to which batch and context a tile of decode is used, declared as data for each arch.

A row of `ops/decode/crossover/<arch>.csv` says what serves problems of its kind up to its rows, batch and context.
Rows belong to a policy. `default` follows our own counts (benchmarks/count_crossovers.py); `aiter-pr3003` is the rule
that AITER's pull request 3003 published for 32 heads x 4 query tokens in fp8. It compares two kernels that are not
ours, so it is taken only where it is asked for:

>>> with crossover.policy("aiter-pr3003"):
...     print(mla_suite.explain("decode", q, kv_cache, seq_lens, block_table, softmax_scale=192**-0.5))

A user's own rows are `decode/crossover-<arch>.csv` in the directory of tuned tables; they come before shipped ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mla_suite.core import dispatch, tuning
from mla_suite.core.arch import Arch
from mla_suite.core.tuning import Row

POLICIES = ("default", "aiter-pr3003")
SHIPPED = Path(__file__).parent / "crossover"
TRITON = "triton"
TILES = {"rows16": 16, "rows32": 32, "rows64": 64, "rows128": 128}
"""What a row may pick: tiles of at most so many query rows, or the triton kernel."""

FORMAT = tuning.Format(
    op="decode",
    exact=(
        tuning.Choice("policy", POLICIES),
        tuning.Choice("shape", ("any", "h32q4")),  # heads and query tokens
        tuning.Choice("query", ("16bit", "fp8")),
        tuning.Choice("cache", ("16bit", "fp8")),
    ),
    near=(
        tuning.Integer("rows", 1, 128),  # of a sequence, q_len x heads; this and the next are upper limits
        tuning.Integer("batch", 1, 1 << 20),
        tuning.Integer("context", 1, 1 << 30),
    ),
    config=(tuning.Choice("use", (*TILES, TRITON)),),
    timed=False,
)

_policy = "default"


@contextmanager
def policy(name: str) -> Iterator[None]:
    """Calls in this process follow the policy; those captured or compiled meanwhile keep what it chose."""
    global _policy
    if name not in POLICIES:
        raise ValueError(f"no crossover policy {name!r}; there are {', '.join(POLICIES)}")
    before, _policy = _policy, name
    dispatch.forget()
    try:
        yield
    finally:
        _policy = before
        dispatch.forget()


def rows(arch: str) -> tuple[Row, ...]:
    """The arch's rows, a user's first."""
    return _rows(arch, tuning.user_directory())


@lru_cache(maxsize=16)
def _rows(arch: str, user: Path) -> tuple[Row, ...]:
    paths = (user / "decode" / f"crossover-{arch}.csv", SHIPPED / f"{arch}.csv")
    return tuple(row for path in paths if path.is_file() for row in tuning.load(FORMAT, arch, path))


def find(problem: Any, arch: Arch) -> Row | None:
    """The row that decides: by the lowest limit on rows that holds, then on batch, then on context; None without one.

    Batch-invariant problems see none, since they may see neither batch nor context. Counted rows are about our own
    cuts, so a plan or a number of splits leaves them out.
    """
    if problem.split_size > 0 or (_policy == "default" and (problem.planned or problem.num_splits > 0)):
        return None
    shape = "h32q4" if (problem.heads, problem.q_len) == (32, 4) else "any"
    kind = (_width(problem.q_dtype), _width(problem.kv_format))
    fitting = [
        row
        for row in rows(arch.name)
        if row.values["policy"] == _policy
        and row.values["shape"] in ("any", shape)
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
    """For `explain`: the row and its limits."""
    limits = ", ".join(f"{column.name} up to {row.values[column.name]}" for column in FORMAT.near)
    return f"{row.provenance['kind']} row {row.place} of crossover policy {row.values['policy']} ({limits})"


def _width(kind: torch.dtype | str) -> str:
    return "fp8" if str(kind).startswith(("fp8", "torch.float8")) else "16bit"
