"""DeepSeek V4.1's own records in SGLang 0.5.23 on H100 and H200: 528 bytes a token, and 288 in the compressed pools.

SGLang keeps these records for SM100: the function that chooses a pool's layout asserts it, and so does the gather of
prefill. Here both are told otherwise where our backend is asked for; all else follows the layout (the table of
docs/vllm_sglang.md).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from mla_suite.integrations import needs
from mla_suite.integrations.interface import Interface
from mla_suite.integrations.sglang import TESTED

with needs("SGLang 0.5.23", __name__, "sparse_decode from a backend of your own"):
    import torch
    from sglang import __version__
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec

LAYOUTS = ("v41", "v41_new")
"""SGLang's names of the layouts with V4.1's records of 528 bytes in the window, in two page orders."""
LAYOUT, COMPRESSED = "SGLANG_DSV4_KV_LAYOUT", "SGLANG_DSV4_COMPRESSED_KV_LAYOUT"
GATHER = "sglang.kernels.ops.attention.dsv4.dequant_k_cache"
NAMES = "sglang.kernels.ops.attention.dsv4.kv_layout"
_ARCH = "get_jit_cuda_arch"


def select_layout(theirs: Callable[[], Any], backend: str) -> Any:
    """SGLang's `select_dsv4_kv_layout`, which lets H100 and H200 have V4.1's records.

    theirs   SGLang's own, which answers unless these are asked for
    backend  our name among the choices of --dsv4-attn-backend
    -> SGLang's layout of the window, and its option for the compressed pools: auto, fp8 or fp4
    """
    layout = getattr(envs, LAYOUT).get().lower()
    ours = get_exec().kernel.dsv4_attn_backend == backend
    if not ours or layout not in LAYOUTS or torch.cuda.get_device_capability()[0] != 9:
        return theirs()
    take_gather()
    return import_module(NAMES).KVLayout.parse(layout), getattr(envs, COMPRESSED).get().lower()


def take_gather() -> None:
    """Have SGLang's gather of prefill read V4.1's records on this GPU.

    Its Triton kernels are plain arithmetic, and the function asks for the arch for nothing but a refusal.
    """
    interface = Interface("sglang_v41", "SGLang", __version__, (TESTED[1], TESTED[1]), f"unset {LAYOUT}")
    kernels = import_module(GATHER)
    interface.has(GATHER, kernels, (_ARCH, "dequantize_k_cache_paged_v41"))
    setattr(kernels, _ARCH, lambda: SimpleNamespace(major=10, minor=0))
