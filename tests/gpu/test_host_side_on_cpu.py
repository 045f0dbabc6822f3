"""The host side of a call, before and after its kernels: it reads no tensor, and allocates its outputs alone.

The kernels themselves are left out, so every arch's host code runs here. On a GPU test_operators_on_gpu.py asks the
same of whole calls: torch's synchronisation check, and its allocator's count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from gpu_problems import CASES, CPU, Problem, tensors
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mla_suite import archs as arch
from mla_suite.core import dispatch
from mla_suite.core.op import Sample
from mla_suite.launch import launcher, tensor_map

READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__", "nonzero", "is_nonzero"}


class Reading(TorchFunctionMode):
    """Fails where the values of a tensor would come to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in READS, f"{func} reads a tensor on the host"
        return func(*args, **(kwargs or {}))


class Allocating(TorchDispatchMode):
    """Counts results that lie in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a tensor's value is read on the host"
        result = func(*args, **(kwargs or {}))
        held = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        fresh = [tensor for tensor in tensors(result) if tensor.untyped_storage().data_ptr() not in held]
        self.made += [str(func)] * len(fresh)
        return result


@contextmanager
def without_kernels(name_of_arch: str) -> Iterator[list[str]]:
    """CPU tensors count as those of the arch; launches are noted instead of made."""
    launched: list[str] = []

    class Noting:
        checks_buffers = False

        def launch(self, kernel: str, *rest: Any) -> None:
            launched.append(kernel)

        def bind(self, kernel: str, *rest: Any) -> Callable[..., None]:
            return lambda params, given: launched.append(kernel)

    def jitted(self: Any, *args: Any, **more: Any) -> None:
        launched.append(self.__name__)

    from triton.runtime.jit import JITFunction

    with ExitStack() as stack:
        stack.enter_context(patch.object(launcher, "_prepared", {}))
        # the map of a cache is made by NVIDIA's driver, from numbers
        stack.enter_context(patch.object(tensor_map, "swizzled", lambda *numbers: (0,) * tensor_map.WORDS))
        stack.enter_context(patch.object(launcher, "_prepare", lambda op, instance, index: (Noting(), instance)))
        stack.enter_context(launcher.declared_kernels())
        stack.enter_context(patch.object(JITFunction, "run", jitted))
        token = dispatch.emulated.set(arch.get(name_of_arch))  # emulate() would take AMD's alone
        stack.callback(dispatch.emulated.reset, token)
        yield launched


def second_call(problem: Problem) -> list[str]:
    """Allocations of a call after the first, which may grow the scratch; reading a tensor fails either."""
    with Reading():
        problem.call()
        with Allocating() as counter:
            problem.call()
    return counter.made


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name_of_arch", arch.names())
@pytest.mark.parametrize(("name", "sample"), CASES, ids=[f"{name}-{sample.name}" for name, sample in CASES])
def test_a_call_reads_and_allocates_nothing(name: str, sample: Sample, backend: str, name_of_arch: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton==3.6.0")
    with without_kernels(name_of_arch) as launched:
        problem = Problem(name, sample, backend, CPU, anywhere=True)
        if problem.unsupported is not None:
            assert not launched
            return
        joins = "parts" in sample.name and (name_of_arch, backend) != ("sm_90", "native")
        assert second_call(problem) == ["aten.cat.default"] * joins
        assert launched


@pytest.mark.parametrize(
    "spoil",
    [lambda args: args[2].tolist(), lambda args: int(args[2].max()), lambda args: bool(args[2][0] > 0)],
    ids=["tolist", "int", "bool"],
)
def test_reading_a_length_is_noticed(spoil: Callable[[Any], object]) -> None:
    problem = next(Problem(name, sample, "reference", CPU) for name, sample in CASES if name == "decode")
    with patch.object(problem, "call", lambda: spoil(problem.args)), pytest.raises(AssertionError, match="host"):
        second_call(problem)


def test_an_allocation_is_noticed() -> None:
    problem = next(Problem(name, sample, "reference", CPU) for name, sample in CASES if name == "decode")
    with patch.object(problem, "call", lambda: problem.args[0].view(-1).clone()):
        assert len(second_call(problem)) == 1
