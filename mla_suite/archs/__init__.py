"""GPU architectures: what each one is (`ArchSpec`), and everything that varies with it, behind one protocol.

An arch has a folder in `csrc/` with its sources and `arch.toml`, and a folder here with a `Kernels` class that says for
each operator which kernel takes a problem. An arch without a folder here has a record and no native kernels.

Importing this package needs neither torch nor a GPU: the build reads records, and kernels are imported at first use.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from mla_suite.archs.spec import CSRC, ArchSpec, get, names, read_arch_file

if TYPE_CHECKING:
    from mla_suite.core.dispatch import Supported, Unsupported
    from mla_suite.ops.plan.scheduler import SchedulerCosts

__all__ = [
    "CSRC",
    "ArchKernels",
    "ArchSpec",
    "get",
    "kernels",
    "names",
    "needed_gpu",
    "no_kernels",
    "read_arch_file",
    "registered",
    "specs",
]

logger = logging.getLogger("mla_suite.archs")


class ArchKernels(Protocol):
    """The native kernels of one arch: a method for each operator that has one.

    An operator without a method has no native kernel there. A method takes the operator's `Problem` and answers with
    `Supported`, whose configuration has a method `spec(outputs, args)`, or with `Unsupported` and a reason in one
    sentence. It reads no tensor.
    """

    arch: ArchSpec
    wavefront: int  # lanes that the kernels are written for
    tile_rows: int  # query rows that a workgroup of decode holds

    def decode(self, problem: Any) -> Supported | Unsupported: ...

    def sparse_decode(self, problem: Any) -> Supported | Unsupported: ...

    def combine(self, problem: Any) -> Supported | Unsupported: ...

    def plan(self, problem: Any) -> Supported | Unsupported: ...

    def append_kv(self, problem: Any) -> Supported | Unsupported: ...

    def convert_kv(self, problem: Any) -> Supported | Unsupported: ...

    def absorbed_prompt(self, head_dim: int, fp8: bool) -> int:
        """Query tokens up to which decode behind many cached keys of head_dim 16-bit or fp8 values takes less time than
        expanding them; 0: it is not known."""
        ...

    def widened_rows(self, num_heads: int) -> int:
        """Records that convert_kv turns into bf16 rows in the time that a query token of sparse_decode gains by
        selecting 2,048 of such rows; 0: it gains nothing, or it is not known."""
        ...

    def fp8_query_rows(self, precision: str, page_size: int, joined: bool) -> int | None:
        """Rows of a sequence from which fp8 queries of an fp8 cache beat 16-bit ones, with decode's `precision`; None:
        none do. joined: the kernel that joins the two parts of a query rounds it, too, else one of its own does."""
        ...

    def takes_query_parts(self, num_heads: int, q_len: int) -> bool:
        """Whether decode over 16-bit rows, and sparse_decode, whose q_len is 1, over others, read 16-bit queries in two
        tensors (q_rope) where they lie."""
        ...

    def scheduler_costs(self, num_q_rows: int) -> SchedulerCosts:
        """Costs for the load balancer of plan, with this number of query rows per sequence."""
        ...


def specs() -> tuple[dict[str, ArchSpec], dict[str, str]]:
    """(records by name, sentences by name of the records that are wrong): one bad record leaves the others usable."""
    good: dict[str, ArchSpec] = {}
    bad: dict[str, str] = {}
    for name in names():
        try:
            good[name] = get(name)
        except ValueError as error:
            bad[name] = str(error)
    return good, bad


@cache
def registered() -> tuple[str, ...]:
    """Names of the archs that have native kernels: a record and a folder here."""
    return tuple(name for name in names() if find_spec(f"{__name__}.{name}") is not None)


@cache
def kernels(arch: ArchSpec) -> ArchKernels | None:
    """The native kernels of an arch; None for one that has none, or whose wavefront is not theirs."""
    if arch.name not in registered():
        return None
    made: ArchKernels = importlib.import_module(f"{__name__}.{arch.name}").Kernels(arch)
    return made if made.wavefront == arch.wavefront else None


def no_kernels(arch: ArchSpec | None) -> str:
    """Why `kernels` gives none, as a sentence; None is a device that is no arch."""
    if arch is None:
        return needed_gpu()
    if arch.name in registered():
        return f"the kernels of {arch.name} are not written for its wavefronts of {arch.wavefront} lanes"
    return f"{needed_gpu()}, not {arch.name}"


def needed_gpu() -> str:
    """The devices that native kernels need, as a sentence: the reason for every other device."""
    gpus = registered()
    emulated = next((name for name in gpus if name in (good := specs()[0]) and good[name].emulable), None)
    hint = f' (or `mla_suite.emulate("{emulated}")` on a CPU)' if emulated else ""
    return f"native kernels need a {', '.join(gpus[:-1])} or {gpus[-1]} GPU{hint}"
