"""Which backend runs a problem, and why: native, then triton, then reference.

`choose` is pure: it sees the problem (hashable facts from metadata), the arch and the device type, never a tensor, so
it is cached and can be explained. A backend answers with an `Offer` or with a `Refusal` in one sentence.

What a call with some metadata was found to need is remembered by that metadata as it was given: how its outputs are
allocated, and what fills them, made ready so far that an equal call only allocates, packs addresses and launches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar, cast

import torch

from mla_suite.core.arch import Arch

logger = logging.getLogger("mla_suite.dispatch")
if os.environ.get("MLA_SUITE_LOG", "") == "dispatch":
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())


@dataclass(frozen=True)
class Offer:
    """A backend takes the problem, with this configuration, for this reason (a table row, a rule, a default)."""

    config: Any
    reason: str


@dataclass(frozen=True)
class Refusal:
    """A backend cannot take the problem; the reason is one sentence."""

    reason: str


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    offer  (problem, arch) -> Offer or Refusal; arch is None on a CPU that emulates nothing
    run    (config, outputs, *args, **kwargs) fills the outputs
    devices  torch device types whose tensors it can be given
    ready  as run, but fills nothing: -> start(outputs, *args), which does for every call with the same metadata; it
           keeps no tensor. None where nothing can be made ready
    """

    name: str
    offer: Callable[[Any, Arch | None], Offer | Refusal]
    run: Callable[..., None]
    devices: tuple[str, ...] = ("cpu", "cuda")
    ready: Callable[..., Callable[..., None]] | None = None


def readied(name: str, offer: Callable[[Any, Arch | None], Offer | Refusal], ready: Callable[..., Any]) -> Backend:
    """A backend of which `ready` is all: to run is to make ready and to start. Its start ignores keyword arguments."""

    def run(config: Any, outputs: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> None:
        ready(config, outputs, *args, **kwargs)(outputs, *args, **kwargs)

    return Backend(name, offer, run, ready=ready)


def triton_backend(module: str) -> Backend:
    """The Triton backend in `module`, which has `offer` and `run`; imported at first use, since triton is optional.

    Triton launches on the current device, so that is made the tensors'.
    """

    def offer(problem: Any, arch: Arch | None) -> Offer | Refusal:
        if find_spec("triton") is None:
            return Refusal("triton is not installed; torch's builds for GPUs bring their own")
        answer: Offer | Refusal = import_module(module).offer(problem, arch)
        return answer

    def run(config: Any, outputs: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> None:
        with torch.cuda.device_of(first_tensor(args)):
            import_module(module).run(config, outputs, *args, **kwargs)

    return Backend("triton", offer, run, devices=("cuda",))


@dataclass(frozen=True)
class Choice:
    """The backend that runs a problem, its offer, and the refusals of those preferred to it."""

    backend: Backend
    offer: Offer
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.backend.name}: {self.offer.reason}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


def _no_arch(tensor: torch.Tensor) -> Arch | None:
    return None


_arch_of: Callable[[torch.Tensor], Arch | None] = _no_arch
_choices: dict[tuple[str, Hashable, str, str | None], Choice] = {}
_warned: set[str] = set()


def set_arch_resolver(resolver: Callable[[torch.Tensor], Arch | None]) -> None:
    """The runtime, one floor above, says which arch a tensor's kernels run on."""
    global _arch_of
    _arch_of = resolver


def arch_of(tensor: torch.Tensor) -> Arch | None:
    return _arch_of(tensor)


def choose(name: str, backends: Sequence[Backend], problem: Hashable, arch: Arch | None, device: str) -> Choice:
    """The first backend that takes the problem on this arch and device type; cached."""
    key = (name, problem, device, arch.name if arch else None)
    choice = _choices.get(key)
    if choice is None:
        choice = _ask(name, backends, problem, arch, device)
        _bounded(_choices)[key] = choice
        logger.info("%s %s on %s -> %s", name, problem, arch.name if arch else device, choice)
        _warn_of_the_reference(name, choice, device)
    return choice


def _warn_of_the_reference(name: str, choice: Choice, device: str) -> None:
    """On a GPU the definition is right and a thousand times slower: say so, once per operator."""
    if device == "cuda" and choice.backend.name == "reference" and choice.refused and name not in _warned:
        _warned.add(name)
        reasons = "; ".join(f"not {who}: {why}" for who, why in choice.refused)
        logger.warning(
            "%s runs as the fp32 reference on a GPU, which is slow and may wait for the device: %s. Of other calls "
            "mla_suite.explain says so",
            name,
            reasons,
        )


def _ask(name: str, backends: Sequence[Backend], problem: Hashable, arch: Arch | None, device: str) -> Choice:
    refused: list[tuple[str, str]] = []
    for backend in backends:
        if device not in backend.devices:
            answer: Offer | Refusal = Refusal(
                f"the tensors are on {device}; it runs on {' and '.join(backend.devices)}"
            )
        else:
            answer = backend.offer(problem, arch)
        if isinstance(answer, Offer):
            return Choice(backend, answer, tuple(refused))
        refused.append((backend.name, answer.reason))
    reasons = "; ".join(f"{who}: {why}" for who, why in refused)
    raise RuntimeError(f"{name}: no backend takes this problem on {arch.name if arch else device} ({reasons})")


class Known(NamedTuple):
    """What calls with the same metadata share."""

    allocate: Callable[[], tuple[torch.Tensor, ...]]
    start: Callable[..., None]  # (outputs, *args) fills the outputs
    kinds: tuple[type, ...]  # of the options: 1, 1.0 and True are one key and three kinds
    calls: dict[str, Any]  # by who recognises such a call again, see repeats.py


_MOST_KNOWN = 4096  # calls and choices remembered; a server's lengths and batch sizes come back
_known: dict[tuple[Any, ...], Known] = {}


def metadata(name: str, tensors: Sequence[Any], options: tuple[Hashable, ...]) -> tuple[Any, ...]:
    """All that specifications, problems and offers may look at in a call: a key for `known` and `remember`.

    tensors  every positional argument in the order of the schema, None where it is left out, then written outputs
    options  the values of every keyword argument, likewise

    Of a tensor: sizes, strides, dtype, device and how its address is aligned, to 16 bytes.
    """
    first = tensors[0] if tensors[0] is not None else first_tensor(tensors)
    arch = None if first.is_cuda else _arch_of(first)  # a GPU's follows from the device
    facts: list[Any] = [name, arch and arch.name, *options]
    add = facts.append
    for value in tensors:
        if value is None:
            add(None)
        elif value.__class__ is list:
            add(tuple(map(_facts, value)))
        else:
            add((value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15))
    return tuple(facts)


def _facts(value: torch.Tensor | None) -> tuple[Any, ...] | None:
    if value is None:
        return None
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15


known: Callable[[tuple[Any, ...]], Known | None] = _known.get


def remember(key: tuple[Any, ...], found: Known) -> Known:
    _bounded(_known)[key] = found
    return found


def _bounded(remembered: dict[Any, Any]) -> dict[Any, Any]:
    """The same, emptied if it is full: a server meets ever new shapes."""
    if len(remembered) >= _MOST_KNOWN:
        remembered.clear()
    return remembered


_Function = TypeVar("_Function", bound=Callable[..., Any])
_forgetting: list[Callable[[], None]] = []


def on_forget(clear: Callable[[], None]) -> None:
    """Have `clear` called by `forget()`."""
    _forgetting.append(clear)


def keep(function: _Function) -> _Function:
    """Decorates a function of hashable arguments whose answers are remembered until `forget()`."""
    remembering = lru_cache(maxsize=_MOST_KNOWN)(function)
    on_forget(remembering.cache_clear)
    return cast(_Function, remembering)


def forget() -> None:
    """Drop cached choices, after a tuned table or the set of built kernels has changed."""
    _choices.clear()
    _warned.clear()
    _known.clear()
    for clear in _forgetting:
        clear()


def first_tensor(args: Sequence[Any]) -> torch.Tensor:
    """The tensor whose device an operator runs on: its first argument, by the schemas' convention."""
    tensor = args[0]
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the first argument must be a tensor, not {type(tensor).__name__}")
    return tensor
