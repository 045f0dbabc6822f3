"""Hostile runs of sparse_decode that every backend must pass: its reference, AMD's kernels emulated, an H200's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from decode_grid import assert_nan_in, assert_within_bound, rows_of_logits
from hostile_inputs import ABSURD, poisoned
from sparse_problems import MODES, POOLS, exact, in_mode, kind_of, problem

from mla_suite.kv_formats import cache as caches
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
    """What computes.

    attend  (args, kwargs) on the CPU -> out and lse on the CPU, by this backend and no other
    close   asserts that out and lse are as near to the exact result as this backend's rounding allows
    """

    attend: Callable[[Any, Any], Result]
    close: Callable[[torch.Tensor, torch.Tensor, Exact], None] = assert_within_bound

    def exact(self, args: Any, kwargs: Any) -> Exact:
        return exact(*args, **kwargs)

    def check(self, args: Any, kwargs: Any) -> Result:
        out, lse = self.attend(args, kwargs)
        self.close(out, lse, self.exact(args, kwargs))
        return out, lse


def pools_in_modes(
    machine: Machine, pools_by_name: Mapping[str, Any], heads: int, turn: int, tokens: int = 6, planned: int = 6
) -> None:
    """All pools, each in another mode; over as many turns as there are modes any two of both meet.

    `planned`: the query tokens of calls with a plan.
    """
    for j, (name, pools) in enumerate(pools_by_name.items()):
        mode = MODES[(turn + j) % len(MODES)]
        args, kwargs = problem(pools, planned if mode == "planned" else tokens, heads, seed=heads + j)
        in_mode(mode, args, kwargs, seed=heads)
        try:
            machine.check(args, kwargs)
        except AssertionError as error:
            raise AssertionError(f"{heads} heads, {name}, {mode}: {error}") from error


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
    keys = torch.randn(320, 576).bfloat16()
    if kind == "equal":
        keys[:] = keys[0]
    elif kind == "dominating":
        keys[200] = q[0, 0] * 4
    else:
        q[:], keys[:300] = rows_of_logits(kind, q.dtype, keys.dtype)
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
    assert_nan_in(slice(1), *machine.attend(args, kwargs | {"num_splits": splits}))


def far_pool(machine: Machine, name: str) -> None:
    """Rows behind offsets of 31 and 32 bits have the bits that they have in a small pool. Three pages are touched."""
    args, kwargs = problem([(name, 1, 64, 4)], 1, 16)
    kind, near = kind_of(name, args[0].shape[-1]), torch.arange(3)
    page_bytes = caches.empty(kind, 2, 64).view(torch.uint8).stride(0)
    far = torch.tensor([-(-(size << 30) // page_bytes) * 64 + size for size in (0, 2, 4)])
    rows, results = torch.randn(3, kind.head_dim), []
    for slots in (near, far):
        cache = caches.empty(kind, int(slots[-1]) // 64 + 1, 64)
        caches.scatter(kind, cache, slots, rows)
        args[1], args[2] = [cache], [torch.tensor([[*slots, len(cache) * 64]], dtype=torch.int32)]
        results.append(machine.check(args, kwargs))
    assert cache.untyped_storage().nbytes() > 4 << 30
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def strided(device: torch.device) -> tuple[list[Any], dict[str, Any], Result]:
    """Arguments on the CPU, queries and indices among them that lie apart, and outputs of the same kind on a device."""
    args, kwargs = problem(POOLS["v4"], 4, 16)
    q = torch.zeros(2, 2, 16, 516, dtype=torch.bfloat16)[..., 2:514]
    q.copy_(args[0].view(2, 2, 16, 512))
    args[0] = q
    args[2] = [torch.nn.functional.pad(index.view(2, 2, -1), (3, 5), value=5)[..., 3:-5] for index in args[2]]
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
