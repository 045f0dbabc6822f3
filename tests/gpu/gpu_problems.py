"""The GPU suite's checks of an operator, in pieces that also run on a CPU, where a call takes a graph's place.

A `Problem` is one sample of the registry: its tensors on the device, and as many other sets of values for them as a
test wants, lengths included. Integers and bytes are those of the definition on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

import mla_suite  # noqa: F401  registers the operators
from mla_suite import testing
from mla_suite.core import check_mode, dispatch, register
from mla_suite.core.dispatch import Supported
from mla_suite.core.op import Sample
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

CPU = torch.device("cpu")
Values = tuple[tuple[Any, ...], dict[str, Any]]
Tensors = tuple[torch.Tensor, ...]

CASES = [(op.name, sample) for op in register.registry().values() for sample in op.samples()]
FIRST = [(op.name, op.samples()[0]) for op in register.registry().values()]
EXACT = ("plan", "append_kv", "convert_kv")
"""Operators whose results are integers or bytes: equal to the definition's, to the last bit."""


def moved(value: Any, device: torch.device) -> Any:
    """Tensors of a tree on another device, with their strides: `.to()` closes the gaps between a cache's blocks."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device).copy_(leaf)

    return pytree.tree_map(move, value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def values(name: str, sample: Sample, turn: int) -> Values:
    """The sample on the CPU; from turn 1 on with other values and lengths. What is written on the CPU is fresh.

    Made by the definition: a sample with a plan calls an operator, and inside `only` that need not run on a CPU.
    """
    with only("reference"):
        args, kwargs = sample.make(CPU)
    if turn:
        generator = torch.Generator().manual_seed(turn)
        _VARY[name](args, kwargs, generator)
    return args, kwargs


def _redraw(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def _below(limits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An integer from 0 to each limit, both included."""
    return (torch.rand(limits.shape, generator=generator) * (limits + 1)).to(torch.int32)


def _vary_plan(args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator) -> None:
    """Within a window, beyond which all lengths are one to a plan."""
    window = kwargs.get("window_left", -1)
    longest = kwargs["max_seqlen_kv"] if window < 0 else window
    args[0].copy_(_below(torch.full_like(args[0], longest), generator))


def _vary_decode(args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator) -> None:
    """Lengths up to what the pages hold; a plan stays as it was made, which a stale one may."""
    q, kv_cache, seq_lens, block_table, indptr, *_ = args
    _redraw(q, generator)
    pages = indptr.diff() if block_table is None else torch.full_like(seq_lens, block_table.shape[1])
    limits = pages * kv_cache.shape[1]
    seq_lens.copy_(_below(limits if args[9] is None else limits.clamp(max=args[9].shape[0]), generator))


def _vary_sparse(args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator) -> None:
    q, kv_caches, indices, _, lengths, *_ = args
    _redraw(q, generator)
    for cache, index, length in zip(kv_caches, indices, lengths, strict=True):
        slots = cache.shape[0] * cache.shape[1]
        index.copy_(torch.randint(-1, slots, index.shape, generator=generator))
        if length is not None:
            length.copy_(_below(torch.full_like(length, index.shape[-1]), generator))


def _vary_combine(args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator) -> None:
    _redraw(args[0], generator)
    _redraw(args[1], generator)
    args[1][torch.rand(args[1].shape, generator=generator) < 0.1] = -torch.inf


def _vary_append(args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator) -> None:
    kv_c, k_pe, kv_cache, slot_mapping, *_ = args
    _redraw(kv_c, generator)
    _redraw(k_pe, generator)
    slots = torch.randperm(kv_cache.shape[0] * kv_cache.shape[1], generator=generator)[: len(slot_mapping)]
    slots[:1] = -1
    slot_mapping.copy_(slots)


def _vary_convert(args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator) -> None:
    """Other rows in `source`, and other slots on both sides, one of them skipped."""
    source, destination, *slot_lists, descale, _ = args
    kind = get_kv_format(kwargs["source_format"])
    shape = (*source.shape[:2], source.shape[2] if kind.dense else kind.head_dim)
    rows = caches.pack(kind, torch.randn(shape, generator=generator), descale=descale)
    source.copy_(rows.view(source.dtype))
    for cache, slots in zip((source, destination), slot_lists, strict=True):
        slots.copy_(torch.randperm(cache.shape[0] * cache.shape[1], generator=generator)[: len(slots)])
    slot_lists[1][:1] = -1


_VARY: dict[str, Callable[[tuple[Any, ...], dict[str, Any], torch.Generator], None]] = {
    "plan": _vary_plan,
    "decode": _vary_decode,
    "sparse_decode": _vary_sparse,
    "combine": _vary_combine,
    "append_kv": _vary_append,
    "convert_kv": _vary_convert,
}


def written(name: str, args: tuple[Any, ...]) -> Tensors:
    """The arguments that the operator writes."""
    op = register.get(name)
    names = [argument.name for argument in torch._C.parse_schema(op.qualname + op.functional.schema).arguments]
    return tuple(args[names.index(each)] for each in op.mutates)


def expected(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Tensors:
    """Outputs, then written arguments, of an operator of EXACT by the definition on the CPU; the arguments themselves
    stay as they are.

    A plan's figures are those of its device's arch, so plan is defined there.
    """
    op = register.get(name)
    reference = next(backend for backend in op.backends if backend.name == "reference")
    place = device if name == "plan" else CPU
    own = moved(args, place)
    outputs = tuple(torch.empty(o.shape, dtype=o.dtype, device=place) for o in op.specify(*own, **kwargs))
    reference.run(None, outputs, op.Args(*own, **kwargs))
    return *outputs, *written(name, own)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


_right: dict[tuple[str, str, int, str], Tensors] = {}
"""Right results by operator, sample, turn and place: tests of both backends ask for it a dozen times, on the CPU."""


class Problem:
    """One sample on a device, for one backend; with `anywhere` also where the backend does not run.

    call()      runs the backend into `outputs`, which stay where they are
    load(turn)  copies other values and lengths into its tensors, poisons its outputs, and keeps what is right
    check()     compares outputs and written arguments with what is right, results that are rounded as check mode does
    """

    def __init__(
        self, name: str, sample: Sample, backend: str, device: torch.device, *, anywhere: bool = False
    ) -> None:
        self.name, self.sample, self.device = name, sample, device
        self.op = register.get(name)
        args, self.kwargs = values(name, sample, 0)
        self.args = moved(args, device)
        self.right: Tensors = ()
        self.backend = next((each for each in self.op.backends if each.name == backend), None)
        self.unsupported: str | None = f"{name} has no {backend} backend for {device.type}"
        if self.backend is not None and (anywhere or device.type in self.backend.devices):
            problem = self.op.problem(*self.args, **self.kwargs)
            answer = self.backend.supports(problem, dispatch.arch_of(dispatch.first_tensor(self.args)))
            self.unsupported = None if isinstance(answer, Supported) else f"{name} {backend}: {answer.reason}"
            self.config = answer.config if isinstance(answer, Supported) else None
        self.outputs = tuple(
            torch.empty(o.shape, dtype=o.dtype, device=device) for o in self.op.specify(*self.args, **self.kwargs)
        )

    def call(self) -> None:
        assert self.backend is not None
        self.backend.run(self.config, self.outputs, self.op.Args(*self.args, **self.kwargs))

    def load(self, turn: int) -> None:
        args, kwargs = values(self.name, self.sample, turn)
        if self.name in EXACT:
            key = (self.name, self.sample.name, turn, self._place())
            if key not in _right:
                _right[key] = expected(self.name, args, kwargs, self.device)
            self.right = _right[key]
        for mine, theirs in zip(tensors(self.args), tensors(args), strict=True):
            mine.copy_(theirs)
        for output in self.outputs:
            testing.poison(output)

    def _place(self) -> str:
        """Where what is right is right: a plan on its device and arch, see `expected`; anything else everywhere."""
        if self.name != "plan":
            return "everywhere"
        arch = dispatch.arch_of(dispatch.first_tensor(self.args))
        return f"{self.device} {arch and arch.name}"

    def check(self) -> None:
        if self.name not in EXACT:
            record = self.op.Args(*self.args, **self.kwargs)
            found = check_mode.first_difference(check_mode.compared(self.op, self.config, self.outputs, record))
            assert found is None, f"{self.name}: {found}"
            return
        for mine, theirs in zip((*self.outputs, *written(self.name, self.args)), self.right, strict=True):
            assert torch.equal(_bytes(mine.cpu()), _bytes(theirs.cpu())), f"{self.name} differs from its definition"


class Recorded:
    """Work captured in a CUDA graph; on a CPU the work itself, which `replay` does again."""

    def __init__(self, work: Callable[[], object], device: torch.device, warm: bool = True) -> None:
        self.work, self.graph = work, None
        if device.type != "cuda":
            return
        if warm:  # Triton compiles and modules are loaded at the first call
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            work()

    def replay(self) -> None:
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()


def steps(problem: Problem, backend: str, call: Callable[..., Any]) -> int:
    """Four turns of `call` on the problem's arguments, each right; the GPU allocations of the last."""
    made = 0
    with only(backend):
        for turn in (1, 2, 3, 4):
            problem.load(turn)
            before = allocations()
            returned = call(*problem.args)
            made = allocations() - before
            for mine, theirs in zip(problem.outputs, tensors(returned), strict=True):
                mine.copy_(theirs)
            del returned
            problem.check()
    return made


_choose = dispatch.choose


@contextmanager
def only(backend: str) -> Iterator[None]:
    """Inside the block the operators choose among this one backend; a block within a block counts alone."""

    def choose(name: str, backends: Any, *rest: Any) -> dispatch.Choice:
        return _choose(name, [each for each in backends if each.name == backend], *rest)

    dispatch.clear_caches()
    try:
        with patch.object(dispatch, "choose", choose):
            yield
    finally:
        dispatch.clear_caches()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """An error at every call that would make the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocations() -> int:
    """Tensors that torch's allocator for GPUs has handed out so far in this process; 0 without a GPU."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
