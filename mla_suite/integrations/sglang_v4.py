"""SGLang's attention of DeepSeek V4 and V4.1 on our sparse decode, on CUDA.

    # sglang serve --model-path deepseek-ai/DeepSeek-V4-Flash --dsv4-attn-backend mla_suite

SGLang's backend `dsv4` stays in place; where it takes FlashMLA's two functions, it finds those of
`mla_suite.integrations.flash_mla`. Queries keep the heads of their rank, where SGLang pads to 64 for FlashMLA.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

from mla_suite.integrations import needs, refuse
from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from mla_suite.integrations.interface import Interface
from mla_suite.integrations.sglang import TESTED
from mla_suite.integrations.sglang_v41 import LAYOUTS as V41_LAYOUTS

with needs("SGLang 0.5.23", __name__, "sparse_decode from a backend of your own"):
    from sglang import __version__
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.models import deepseek_v4

NAME = "--dsv4-attn-backend mla_suite"
OTHERWISE = "choose another --dsv4-attn-backend"
KERNELS = "sglang.kernels.ops.attention.flash_mla_interface"
LAYOUT = "v4"  # SGLang's name of the 584-byte records
V4_RATIOS = {4, 128}  # of V4's compressed layers; V4.1's are 1 and 2


def take_kernels(model_runner: Any) -> None:
    """Put our functions in the place of FlashMLA's in this process, before SGLang's backend is made for the runner.

    ValueError or NotImplementedError, in a sentence, for a server that this backend does not serve.
    """
    check(model_runner)
    _put_in_place()


@cache
def _put_in_place() -> None:
    interface = Interface("sglang_v4", "SGLang", __version__, (TESTED[1], TESTED[1]), OTHERWISE)
    kernels = import_module(KERNELS)
    interface.has(KERNELS, kernels, ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"))
    backend, layer = deepseek_v4_backend.DeepseekV4AttnBackend, deepseek_v4.MqaAttentionBase
    interface.has("DeepseekV4AttnBackend", backend, ("_forward_prefill_sparse",))
    interface.has("MqaAttentionBase", layer, ("_kernel_num_heads",))
    interface.warn_if_newer(stacklevel=4)
    kernels.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    kernels.flash_mla_sparse_fwd = partial(flash_mla_sparse_fwd, return_log2_lse=False)  # type: ignore[attr-defined]
    layer._kernel_num_heads = _own_heads


def _own_heads(layer: Any, num_tokens: int) -> int:
    """The heads with which a layer lays out queries: those of its rank, since our kernels take any number."""
    own: int = layer.n_local_heads
    return own


def check(model_runner: Any) -> None:
    """Refuse what this backend does not do."""
    options = model_runner.server_args
    if not deepseek_v4_backend.is_cuda():
        refuse("sglang_v4", f"{NAME} is given without CUDA", OTHERWISE, NotImplementedError)
    pool = model_runner.token_to_kv_pool
    layout = pool.get_swa_key_layout().value
    if layout not in (LAYOUT, *V41_LAYOUTS):
        possible = f"it reads those of SGLANG_DSV4_KV_LAYOUT={LAYOUT}, {' and '.join(V41_LAYOUTS)}, or {OTHERWISE}"
        refuse("sglang_v4", f"the pool has the layout {layout!r}", possible, NotImplementedError)
    if layout != LAYOUT and not V4_RATIOS.isdisjoint(pool.present_ratios):
        possible = f"V4's records are of 584 bytes alone: set SGLANG_DSV4_KV_LAYOUT={LAYOUT}"
        refuse("sglang_v4", f"the layout {layout!r} of V4.1 is asked for with V4", possible, NotImplementedError)
    mode = getattr(options, "disaggregation_mode", None)
    if mode not in (None, "null"):
        possible = f"it is not done with {NAME}: serve without it, or {OTHERWISE}"
        refuse("sglang_v4", f"--disaggregation-mode is {mode}", possible, NotImplementedError)
    if getattr(options, "enable_hisparse", False):
        possible = f"keys are read from the GPU alone: serve without it, or {OTHERWISE}"
        refuse("sglang_v4", "--enable-hisparse is given", possible, NotImplementedError)
    if getattr(options, "enable_deterministic_inference", False):
        possible = f"SGLang has no deterministic inference of V4: serve without it, or {OTHERWISE}"
        refuse("sglang_v4", "--enable-deterministic-inference is given", possible, NotImplementedError)
    for name in ("attn_cp_size", "dcp_size"):
        ranks = getattr(options, name, None) or 1
        if ranks > 1:
            possible = f"context parallelism is not done with {NAME}: leave it at 1, or {OTHERWISE}"
            refuse("sglang_v4", f"--{name.replace('_', '-')} is {ranks}", possible, NotImplementedError)
    if getattr(options, "enable_prefill_cp", False):
        possible = f"context parallelism is not done with {NAME}: serve without it, or {OTHERWISE}"
        refuse("sglang_v4", "--enable-prefill-cp is given", possible, NotImplementedError)
