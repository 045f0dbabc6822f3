"""Whether a kernel may begin while the one ahead of it on its stream still runs (programmatic dependent launch)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mla_suite.core import checks

_never = checks.env_flag("MLA_SUITE_NO_EARLY_LAUNCH", os.environ.get("MLA_SUITE_NO_EARLY_LAUNCH", ""), "1")
allowed: ContextVar[bool] = ContextVar("mla_suite_early_launch", default=not _never)


@contextmanager
def early_launch(allow: bool) -> Iterator[None]:
    """Within the block, and in this thread, kernels may begin early on GPUs that can, or with False may not.

    By default they may: a kernel's first instructions run, and its workgroups take their SMs, while the kernel ahead of
    it still runs, and it waits itself before it reads that one's results. Where its workgroups would keep SMs from
    another stream that must make progress, such as a collective's, switch it off; results are the same, and a call
    takes longer.

    What counts is the block in which a kernel is enqueued. A call that is captured keeps, at every replay, what held
    when it was captured; a compiled function obeys the block in which it is called, and with CUDA graphs of its own
    (`mode="reduce-overhead"`) that in which it records them. Enter the block outside a compiled function, not in it.
    """
    with checks.having(allowed, allow):
        yield
