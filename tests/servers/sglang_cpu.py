"""Stand-ins with which SGLang is imported, and its engine runs, on a CPU: import this before SGLang.

Libraries that SGLang only imports are modules of mocks. `sgl_kernel`, its compiled library, whose CPU build package
indexes do not carry, is a module of functions that raise. SGLang then takes its own torch code, and its Triton kernels
run in Triton's interpreter. `use_triton` sends the few modules that know only the library to the Triton kernels that
SGLang has beside them for Intel's GPUs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers.models.auto.processing_auto  # noqa: F401  # asks for torchvision before it seems to be there

# SGLang imports these at its top; nothing of them is called here. torchvision alone would bring a torch of its own.
ONLY_IMPORTED = ("IPython", "torchvision", "sentencepiece", "gguf", "soundfile")
ENGINE = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}
"""Variables of the processes of an engine."""
COMPILED = ("sgl_kernel", "sgl_kernel.speculative")
HAVE_TRITON = (
    "sglang.srt.mem_cache.allocation",
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.eagle",
    "sglang.kernels.ops.speculative.multi_layer_eagle",
    "sglang.kernels.ops.speculative.reconstruct_tree",
    "sglang.kernels.ops.speculative.spec_tree",
    "sglang.srt.speculative.ngram_worker",  # which makes the mask that the Triton backend reads
)
"""Modules that call the compiled library on a CPU, and have a Triton kernel for each call."""


class _Anything(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _Compiled(_Anything):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} is not to be had for a CPU")

        return call


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        in_engine = "SGLANG_USE_CPU_ENGINE" in os.environ
        if name.split(".")[0] in ONLY_IMPORTED or (in_engine and name in COMPILED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return (_Compiled if spec.name in COMPILED else _Anything)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def use_triton() -> None:
    """Entry point: make SGLang take its Triton kernels where it would call its compiled library."""
    for name in HAVE_TRITON:
        module = importlib.import_module(name)
        module._is_cpu, module._is_xpu = False, True
    batch_invariant_ops = importlib.import_module("sglang.srt.batch_invariant_ops")
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None  # it replaces the products of GPUs alone
    torch.cuda.synchronize = lambda *device: None  # which DeepSeek's draft model calls wherever it is


sys.meta_path.append(_Absent())  # last, so that an installed library is taken
