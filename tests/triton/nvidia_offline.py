"""Triton's kernels for an NVIDIA GPU on a machine without one: compiled as far as the shared memory they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from triton._C.libtriton import ir, llvm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature


class Reached(Exception):
    """The launch that was looked for."""


def first_launch(run: Callable[[], object]) -> tuple[JITFunction, tuple[Any, ...], dict[str, Any]]:
    """The first kernel that `run` launches, with its arguments; it is not launched, and nothing after it happens."""
    found = []

    def stop(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append((self, args, kwargs))
        raise Reached

    with patch.object(JITFunction, "run", stop):
        try:
            run()
        except Reached:
            return found[0]
    raise AssertionError("no kernel was launched")


def shared_bytes(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> int:
    """Shared memory of a block of the kernel, compiled for a compute capability (90: sm_90) and these arguments."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    given = {"debug": False, **kwargs}
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **given
    )
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, source.language)
    metadata = {"target": target, **vars(options)}
    code = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, code, backend.get_module_map(), context)
    # Shared memory is known before LLVM optimises, which takes a third of the time.
    with patch.object(llvm, "optimize_module", lambda *given, **named: None):
        for stage in ("ttir", "ttgir", "llir"):
            module = stages[stage](module, metadata)
    return int(metadata["shared"])
