"""Hostile runs of sparse_decode's native kernels that every machine must pass: AMD's in the emulator, an H200's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from decode_grid import assert_within_bound
from hostile_inputs import ABSURD, poisoned
from sparse_problems import POOLS, exact, problem

from mla_suite.testing import Exact

Result = tuple[torch.Tensor, torch.Tensor]
KINDS = ("equal", "dominating", "rising", "falling", "large")
SINKS = (torch.inf, -torch.inf, 0.0, 60.0)
SELECTIONS: dict[str, Callable[[int, int], list[int]]] = {
    "duplicates": lambda slots, n: [5] * n,
    "all invalid": lambda slots, n: [ABSURD[i % 4] for i in range(n)],
    "one valid": lambda slots, n: [-1] * (n // 2) + [slots - 1] + [slots] * (n - n // 2 - 1),
    "last token": lambda slots, n: [slots - 1, slots] * (n // 2),
    "first token": lambda slots, n: [0, -1] * (n // 2),
}
"""Indices of one query token into a pool of `slots` slots."""


class Machine(NamedTuple):
    """Where kernels run.

    attend  (args, kwargs) on the CPU -> out and lse on the CPU, by native kernels and nothing else
    """

    attend: Callable[[Any, Any], Result]

    def exact(self, args: Any, kwargs: Any) -> Exact:
        return exact(*args, **kwargs)

    def check(self, args: Any, kwargs: Any) -> Result:
        out, lse = self.attend(args, kwargs)
        assert_within_bound(out, lse, self.exact(args, kwargs))
        return out, lse


def every_length(machine: Machine, name: str, heads: int, sizes: Sequence[int], splits: int) -> None:
    """In one ragged call."""
    args, kwargs = problem([(name, 8, 64, sum(sizes))], 1, heads)
    args[0] = args[0].expand(len(sizes), heads, -1).contiguous()
    args[2], args[3] = [args[2][0].flatten()], [torch.tensor([0, *sizes]).cumsum(0).int()]
    machine.check(args, kwargs | {"num_splits": splits})


def hard_scores(machine: Machine, heads: int, kind: str) -> None:
    """Logits to +-200, rows all equal, one key above all others, and references that rise at every tile or never."""
    (q, (cache,), (index,), *rest), kwargs = problem([("bf16", 5, 64, 300)], 1, heads, invalid=0)
    index[0] = torch.arange(300)
    direction = torch.randn(576)
    keys = torch.randn(320, 576)
    if kind == "equal":
        keys[:] = keys[0]
    elif kind == "dominating":
        keys[200] = q[0, 0].float() * 4
    else:
        logits = torch.linspace(-200, 200, 300)
        logits = {"large": logits[torch.randperm(300)], "rising": logits, "falling": logits.flip(0)}[kind]
        q[:] = direction.bfloat16()
        keys[:300] = logits[:, None] * 24 / direction.square().sum() * direction + keys[:300] / 4
        reached = keys[:300].bfloat16().double() @ direction.bfloat16().double() * kwargs["softmax_scale"]
        assert float(reached.min()) < -195
        assert float(reached.max()) > 195
    cache.copy_(keys.view(5, 64, 576))
    machine.check([q, [cache], [index], *rest], kwargs | {"num_splits": 1})


def selections(machine: Machine, name: str, heads: int, selection: str) -> None:
    """Two pools; query token 1 has no key."""
    args, kwargs = problem([(name, 3, 16, 1), (name, 2, 64, 1)], 2, heads)
    for i, cache in enumerate(args[1]):
        slots = cache.shape[0] * cache.shape[1]
        chosen = SELECTIONS[selection](slots, 40)
        args[2][i] = torch.tensor([chosen, [-1] * 40], dtype=torch.int32)
        used = {slot for slot in chosen if 0 <= slot < slots}
        args[1][i] = poisoned(name, cache.shape[0], cache.shape[1], used, 3, args[0].shape[-1], spread=2)
    out, lse = machine.check(args, kwargs)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert bool((lse[1] == -torch.inf).all())


def sinks(machine: Machine, sink: float, splits: int) -> None:
    """Query token 1 has no key; a pool may have no pages and another no indices."""
    args, kwargs = problem([("dsv4", 2, 16, 9), ("dsv4", 0, 16, 5), ("dsv4", 2, 16, 0)], 2, 12)
    args[2][0][1] = -1
    kwargs["num_splits"] = splits
    plain, plain_lse = machine.attend(args, kwargs)
    args[5] = torch.full((12,), sink)
    out, lse = machine.check(args, kwargs)
    assert torch.equal(lse, plain_lse)
    assert sink != torch.inf or not bool(out.any())
    assert sink != -torch.inf or torch.equal(out, plain)


def extreme_scales(machine: Machine, heads: int = 16, name: str = "dsv4") -> None:
    """Scale bytes 0 and 254 (2^-127 and 2^127), and NaN codes and scales in all slots that nobody selects."""
    args, kwargs = problem([(name, 2, 64, 100)], 1, heads, invalid=0)
    (cache,), (index,) = args[1], args[2]
    scales = torch.as_strided(cache, (2, 64, 8), (cache.stride(0), 8, 1), 64 * 576)
    codes = torch.as_strided(cache, (2, 64, 576), (cache.stride(0), 576, 1))
    small, large = divmod(int(index[0, 3]), 64), divmod(int(index[0, 40]), 64)
    scales[small] = 0
    scales[large] = 254
    codes[large][:448] = 1  # 2^-9 or, in FNUZ, half of that: rows of 2^118
    q = args[0]
    q[..., :448] = q[..., :448].abs() * -1  # so that this key's weight is 0 and its row stays out of every sum
    machine.check(args, kwargs)


def selected_nan(machine: Machine, name: str, splits: int) -> None:
    """Query token 0 selects a poisoned row, and only its result says so."""
    args, kwargs = problem([(name, 4, 64, 130)], 2, 16, invalid=0)
    args[2][0][0, 77] = next(s for s in range(256) if s not in args[2][0].flatten().tolist())
    out, lse = machine.attend(args, kwargs | {"num_splits": splits})
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all() and lse[1].isfinite().all())


def strided(device: torch.device) -> tuple[list[Any], dict[str, Any], Result]:
    """Arguments on the CPU, queries among them that lie apart, and outputs of the same kind on a device."""
    args, kwargs = problem(POOLS["v4"], 4, 16)
    q = torch.zeros(2, 2, 16, 516, dtype=torch.bfloat16)[..., 2:514]
    q.copy_(args[0].view(2, 2, 16, 512))
    args[0], args[2] = q, [index.view(2, 2, -1) for index in args[2]]
    out = torch.zeros(2, 3, 32, 520, dtype=torch.bfloat16, device=device)[:, :2, ::2, :512]
    lse = torch.zeros(2, 3, 32, device=device)[:, :2, :16]
    return args, kwargs, (out, lse)


def batch_invariant(machine: Machine, heads: int, pools: str = "v4", split_size: int = 64) -> None:
    """The first and the last query token of nine alone give the bits that they give among all."""
    args, kwargs = problem(POOLS[pools], 9, heads)
    whole = machine.attend(args, kwargs | {"split_size": split_size})
    for t in (0, 8):
        single = [args[0][t : t + 1], args[1], [index[t : t + 1] for index in args[2]], *args[3:]]
        alone = machine.attend(single, kwargs | {"split_size": split_size})
        assert all(torch.equal(a[t], b[0]) for a, b in zip(whole, alone, strict=True))
