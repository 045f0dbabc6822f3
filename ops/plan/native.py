"""plan on our own kernels: two launches for a balanced plan, one for a uniform one; nothing is read on the host."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from mla_suite.build.params import load
from mla_suite.core.arch import Arch
from mla_suite.core.dispatch import Offer, Refusal, readied
from mla_suite.launch import Buffer, bind, has_kernel
from mla_suite.ops.plan import metadata as words
from mla_suite.ops.plan.cost import figures
from mla_suite.ops.plan.metadata import Word

MOST_SEQUENCES = 2048  # whose prefix sum a workgroup keeps in shared memory
# Of a workgroup, for up to FEW sequences and for more: on an H200 five warps, a cut a lane for 132 workers, are the
# fastest as long as each sequence has a thread, too.
FEW = 160
WAVES = {
    "nvidia": dict(search=(5, 8), balanced=(5, 16), uniform=(8, 8)),
    "amd": dict(search=(4, 4), balanced=(8, 8), uniform=(4, 4)),
}
_NAMES = {word: word.name.lower() for word in Word if word not in (Word.ITEMS_USED, Word.PARTIAL_ROWS)}


def waves(arch: Arch, step: str, batch: int) -> int:
    return WAVES[arch.vendor][step][batch > FEW]


def instance(arch: Arch, step: str, batch: int) -> str:
    return f"plan_step-{step}_waves-{waves(arch, step, batch)}"


def _steps(num_splits: int, split_size: int) -> tuple[str, ...]:
    return ("uniform",) if num_splits > 0 or split_size > 0 else ("search", "balanced")


def offer(problem: Any, arch: Arch | None) -> Offer | Refusal:
    if arch is None:
        return Refusal("no arch of ours runs these tensors: it takes gfx942, gfx950 and sm_90, AMD's also emulated")
    if problem.batch < 1 or problem.batch > MOST_SEQUENCES:
        return Refusal(f"{problem.batch} sequences; it takes 1 to {MOST_SEQUENCES}")
    steps = _steps(problem.num_splits, problem.split_size)
    for needed in (instance(arch, step, problem.batch) for step in steps):
        if not has_kernel(arch, needed):
            return Refusal(f"kernel {needed} is not built for {arch.name}; run `python -m mla_suite build`")
    return Offer(arch, f"{' then '.join(steps)}, {len(steps)} launch{'es' if len(steps) > 1 else ''}")


_POINTERS = ("seq_lens", "cu_seqlens_q", "plan")
_pack_pointers = struct.Struct(f"<{len(_POINTERS)}Q").pack


class _Step(NamedTuple):
    """One launch."""

    name: str
    instance: str
    grid: tuple[int, int, int]
    threads: int


@lru_cache(maxsize=1024)
def _prepare(
    arch: Arch, batch: int, rows: int, workers: int, max_seqlen_kv: int, num_splits: int, split_size: int
) -> tuple[bytes, tuple[_Step, ...]]:
    """The parameters after the pointers, and the launches: equal calls share them."""
    place = words.layout_for(batch, workers, max_seqlen_kv=max_seqlen_kv, num_splits=num_splits, split_size=split_size)
    header = place.header(num_splits=num_splits, split_size=split_size, max_seqlen_kv=max_seqlen_kv)
    splits = num_splits or (int(words.splits_of(max_seqlen_kv, split_size)) if split_size > 0 else 0)
    costs = figures(arch, rows)
    threads = waves(arch, "uniform", batch) * arch.wavefront
    workgroups = min(-(-batch * splits // threads), arch.compute_units) if splits > 0 else 1
    packed = load("plan").pack(
        **dict.fromkeys(_POINTERS, 0),
        item_cost=costs.item,
        tile_rows=costs.tile_rows,
        shared_cost=costs.shared,
        splits=splits,
        workgroups=workgroups,
        **{name: header[word] for word, name in _NAMES.items()},
    )
    groups = {"uniform": workgroups, "search": workers, "balanced": 1}
    steps = tuple(
        _Step(step, instance(arch, step, batch), (groups[step], 1, 1), waves(arch, step, batch) * arch.wavefront)
        for step in _steps(num_splits, split_size)
    )
    return packed[8 * len(_POINTERS) :], steps


def ready(
    config: Arch,
    outputs: tuple[torch.Tensor, ...],
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    rows: int,
    workers: int,
    max_seqlen_kv: int,
    num_splits: int = 0,
    split_size: int = 0,
) -> Callable[..., None]:
    batch = seq_lens.shape[0]
    numbers, steps = _prepare(config, batch, rows, workers, max_seqlen_kv, num_splits, split_size)
    launches = [
        bind("plan", step.instance, seq_lens, step.grid, step.threads, 0, partial(_buffers, step.name), overlap=True)
        for step in steps
    ]

    def start(
        outputs: tuple[torch.Tensor, ...], seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, **_: Any
    ) -> None:
        (plan,) = outputs
        cuts_at = 0 if cu_seqlens_q is None else cu_seqlens_q.data_ptr()
        params = _pack_pointers(seq_lens.data_ptr(), cuts_at, plan.data_ptr()) + numbers
        given = plan, seq_lens, cu_seqlens_q
        for launch in launches:
            launch(params, given)

    return start


def _buffers(
    step: str, plan: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> Iterator[Buffer]:
    yield Buffer("seq_lens", seq_lens, "r")
    if cu_seqlens_q is not None:
        yield Buffer("cu_seqlens_q", cu_seqlens_q, "r")
    # The second step reads what the first left in the words of the items.
    yield Buffer("plan", plan, {"search": "w", "balanced": "rw", "uniform": "all"}[step])


BACKEND = readied("native", offer, ready)
run = BACKEND.run
