"""Which backend runs a problem, and why: native, then triton, then reference.

`choose` is pure: it sees the problem (hashable facts from metadata), the arch and the device type, never a tensor, so
it is cached and can be explained. A backend answers with `Supported` or with `Unsupported` and a reason.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any, TypeVar, cast

import torch

from mla_suite import archs
from mla_suite.archs import ArchSpec
from mla_suite.core import checks

logger = logging.getLogger("mla_suite.dispatch")
if checks.env_flag("MLA_SUITE_LOG", os.environ.get("MLA_SUITE_LOG", ""), "dispatch"):
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())

Launch = Callable[[tuple[torch.Tensor, ...], tuple[Any, ...]], None]
"""(outputs, positional arguments) -> None: fills the outputs of any call with the metadata it was prepared for."""


@dataclass(frozen=True)
class Supported:
    """A backend takes the problem, with this configuration, for this reason (a table row, a rule, a default)."""

    config: Any
    reason: str


@dataclass(frozen=True)
class Unsupported:
    """A backend cannot take the problem; the reason is one sentence."""

    reason: str


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    supports  (problem, arch) -> Supported or Unsupported; arch is None on a CPU that emulates nothing
    prepare   (configuration, outputs, Args) -> `Launch` for calls with the same metadata; it fills nothing and holds no
              tensor
    devices   torch device types whose tensors it can be given
    """

    name: str
    supports: Callable[[Any, ArchSpec | None], Supported | Unsupported]
    prepare: Callable[[Any, tuple[torch.Tensor, ...], Any], Launch]
    devices: tuple[str, ...] = ("cpu", "cuda")

    def run(self, config: Any, outputs: tuple[torch.Tensor, ...], args: Any, seen: Any = None) -> None:
        """Fill the outputs of one call; `seen` is what `Op.seen` makes of it, where its launch is to be a call's."""
        self.prepare(config, outputs, args if seen is None else seen)(outputs, _tensors(args))


def _tensors(args: Any) -> tuple[Any, ...]:
    """The positional arguments of an `Args` record."""
    return tuple([getattr(args, name) for name in args.__match_args__])


def backends(op: str, reference: Callable[[Any, tuple[torch.Tensor, ...], Any], None]) -> tuple[Backend, ...]:
    """The backends of an operator in order of preference: its kernels, `ops/<op>/triton.py`, and `reference`."""
    return native_backend(op), triton_backend(f"mla_suite.ops.{op}.triton"), reference_backend(reference)


def reference_backend(run: Callable[[Any, tuple[torch.Tensor, ...], Any], None]) -> Backend:
    """The definition of an operator in fp32 as a backend: run(None, outputs, Args)."""
    reason = Supported(None, "fp32 reference (supports every input)")

    def in_fp32(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
        # autocast would round the operands of its products to 16 bits; autograd would pass tangents on to the outputs
        no_autocast = torch.autocast(first_tensor(_tensors(args)).device.type, enabled=False)
        with no_autocast, torch._C._AutoDispatchBelowAutograd(), writable(outputs), _fp32_products:
            run(config, outputs, args)

    return Backend("reference", lambda problem, arch: reason, partial(_prepare_run, in_fp32))


class _Fp32Products:
    """In this context torch multiplies fp32 matrices in fp32, whatever `torch.set_float32_matmul_precision` says.

    That is a setting of the process: the first thread that enters changes it, the last one that leaves puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = Lock(), 0, ["none"] * 2

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = [each.fp32_precision for each in self._settings()]
                for each, before in zip(self._settings(), self._before, strict=True):
                    if before not in ("ieee", "none"):
                        each.fp32_precision = "ieee"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for each, before in zip(self._settings(), self._before, strict=True):
                    if before not in ("ieee", "none"):
                        each.fp32_precision = before

    @staticmethod
    def _settings() -> tuple[Any, Any]:
        backends: Any = torch.backends
        return backends.cuda.matmul, backends.mkldnn.matmul


_fp32_products = _Fp32Products()


def writable(outputs: tuple[torch.Tensor, ...]) -> AbstractContextManager[Any]:
    """In this context torch's functions may write to the outputs, as kernels may: also to those that were made in
    inference mode, which torch lets nobody write to outside of it."""
    return torch.inference_mode() if any(output.is_inference() for output in outputs) else nullcontext()


def _prepare_run(
    run: Callable[[Any, tuple[torch.Tensor, ...], Any], None], config: Any, outputs: tuple[torch.Tensor, ...], args: Any
) -> Launch:
    """A launch that calls `run` with the options of `args` and the tensors of each call."""
    positional = args.__match_args__
    options = {name: getattr(args, name) for name in args.__dataclass_fields__ if name not in positional}
    record = type(args)

    def launch(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
        run(config, outputs, record(*tensors, **options))

    return launch


def native_backend(op: str) -> Backend:
    """The kernels of this repository: the arch of the tensors says which of them takes a problem."""

    def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
        kernels = None if arch is None else archs.kernels(arch)
        if kernels is None:
            return Unsupported(archs.no_kernels(arch))
        method = getattr(kernels, op, None)
        if method is None:
            return Unsupported(f"{kernels.arch.name} has no native kernel of {op}")
        answer: Supported | Unsupported = method(problem)
        return answer

    def prepare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Launch:
        return launcher(op, config.spec(outputs, args), outputs, _tensors(args))

    return Backend("native", supports, prepare)


def triton_backend(module: str) -> Backend:
    """The Triton backend in `module`, which has `supports` and `run`; imported at first use, since triton is optional.

    Triton launches on the current device, so that is made the tensors'.
    """

    def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
        if find_spec("triton") is None:
            return Unsupported("triton is not installed; torch's builds for GPUs bring their own")
        answer: Supported | Unsupported = import_module(module).supports(problem, arch)
        return answer

    def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
        with torch.cuda.device_of(first_tensor(_tensors(args))), writable(outputs):
            import_module(module).run(config, outputs, args)

    return Backend("triton", supports, partial(_prepare_run, run), devices=("cuda",))


@dataclass(frozen=True)
class Choice:
    """The backend that runs a problem, its configuration, and the reasons of those preferred to it."""

    backend: Backend
    supported: Supported
    refused: tuple[tuple[str, str], ...]

    @property
    def needs_permission(self) -> bool:
        """Whether a call on a GPU is an error outside of `allow_reference`, since no kernel takes it."""
        return self.backend.name == "reference" and bool(self.refused)

    def __str__(self) -> str:
        lines = [f"{self.backend.name}: {self.supported.reason}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


emulated: ContextVar[ArchSpec | None] = ContextVar("mla_suite_emulated", default=None)
"""The arch that CPU tensors stand for in this context, set by `mla_suite.emulate`."""

policy: ContextVar[str] = ContextVar("mla_suite_policy", default="default")
"""The policy of tuned rows that choices follow in this context, set by `decode_table.policy`."""


arch_of: Callable[[torch.Tensor], ArchSpec | None] = cast(Any, None)
"""The arch that a tensor's kernels run on: a function of the launch layer, which `mla_suite.ops` puts here."""

launcher: Callable[[str, Any, tuple[torch.Tensor, ...], tuple[Any, ...]], Launch] = cast(Any, None)
"""Makes a launch of (operator, its record, outputs, tensors), likewise."""

_choices: dict[tuple[str, Hashable, str, ArchSpec | None, str], Choice] = {}
_warned: set[str] = set()


def choose(name: str, backends: Sequence[Backend], problem: Hashable, arch: ArchSpec | None, device: str) -> Choice:
    """The first backend that takes the problem on this arch and device type; cached."""
    key = (name, problem, device, arch, policy.get())
    choice = last_used(_choices, key)
    if choice is None:
        choice = ask(name, backends, problem, arch, device)
        bounded(_choices)[key] = choice
        logger.info("%s %s on %s -> %s", name, problem, arch.name if arch else device, choice)
        _warn_of_what_is_not_built(name, choice)
    return choice


_calls: ContextVar[Counter[tuple[str, str, str]] | None] = ContextVar("mla_suite_calls", default=None)
counting: Callable[[], Counter[tuple[str, str, str]] | None] = _calls.get


@contextmanager
def count_calls() -> Iterator[Counter[tuple[str, str, str]]]:
    """Within the block, and in this thread, calls are counted by (operator, backend, configuration).

    A call that a CUDA graph captures is counted once, and its replays are not: they do not pass through Python.
    """
    calls: Counter[tuple[str, str, str]] = Counter()
    with checks.switched(_calls, calls):
        yield calls


HOW_TO_BUILD = "run `python -m mla_suite build`"
"""How the reason of a backend ends whose kernel exists in source and was not built."""
_reference_allowed: ContextVar[bool] = ContextVar("mla_suite_reference_allowed", default=False)
reference_allowed: Callable[[], bool] = _reference_allowed.get


@contextmanager
def allow_reference() -> Iterator[None]:
    """While the block runs, calls on a GPU that no kernel takes run as the fp32 reference.

    It takes a thousand times as long as a kernel and reads lengths on the host. Outside of the block it is an error.
    CPU tensors need no permission.
    """
    with checks.having(_reference_allowed, True):
        yield


def _warn_of_what_is_not_built(name: str, choice: Choice) -> None:
    """Log once per operator that Triton runs because a kernel of ours was never built."""
    missing = [reason for backend, reason in choice.refused if backend == "native" and reason.endswith(HOW_TO_BUILD)]
    if missing and choice.backend.name == "triton":
        warn_once(name, f"{name} runs in Triton, which is slower than the kernel that it stands in for: {missing[0]}")


def warn_once(about: str, sentence: str) -> None:
    """Log a warning unless one about the same was logged since `clear_caches()`."""
    if about not in _warned:
        _warned.add(about)
        logger.warning("%s", sentence)


def ask(name: str, backends: Sequence[Backend], problem: Hashable, arch: ArchSpec | None, device: str) -> Choice:
    """Return what `choose` answers for the first time, without caching, counting or logging it."""
    refused: list[tuple[str, str]] = []
    for backend in backends:
        if device not in backend.devices:
            answer: Supported | Unsupported = Unsupported(f"needs {' or '.join(backend.devices)} tensors, got {device}")
        else:
            answer = backend.supports(problem, arch)
        if isinstance(answer, Supported):
            return Choice(backend, answer, tuple(refused))
        refused.append((backend.name, answer.reason))
    reasons = "; ".join(f"{who}: {why}" for who, why in refused)
    raise RuntimeError(f"{name}: no backend takes this problem on {arch.name if arch else device} ({reasons})")


MAX_CACHED = 1024  # entries of a cache of choices or calls; of each, the garbage collector follows 90 objects


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def bounded(cache: dict[_Key, _Value]) -> dict[_Key, _Value]:
    """The cache, without its first entry if it is full: a server meets ever new shapes."""
    while len(cache) >= MAX_CACHED:
        cache.pop(next(iter(cache)), None)  # another thread may have taken it
    return cache


def last_used(cache: dict[_Key, _Value], key: _Key) -> _Value | None:
    """The value of a key, whose entry becomes the last that `bounded` drops."""
    value = cache.pop(key, None)
    if value is not None:
        cache[key] = value
    return value


_Function = TypeVar("_Function", bound=Callable[..., Any])
_clear: list[Callable[[], None]] = []


def on_clear(clear: Callable[[], None]) -> None:
    """Have `clear` called by `clear_caches()`."""
    _clear.append(clear)


def cached(function: _Function) -> _Function:
    """Decorates a function of hashable arguments whose answers are kept until `clear_caches()`."""
    keeping = lru_cache(maxsize=MAX_CACHED)(function)
    on_clear(keeping.cache_clear)
    return cast(_Function, keeping)


def clear_caches() -> None:
    """Drop cached choices and prepared calls, after a tuned table or the set of built kernels has changed."""
    _choices.clear()
    _warned.clear()
    for clear in _clear:
        clear()


def first_tensor(args: Sequence[Any]) -> torch.Tensor:
    """The tensor whose device an operator runs on: its first argument, by the schemas' convention."""
    tensor = args[0]
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the first argument must be a tensor, not {type(tensor).__name__}")
    return tensor
