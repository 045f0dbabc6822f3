"""DeepSeek V4 and V4.1 in vLLM 0.32 and 0.33, their attention on our sparse decode.

    # vllm serve deepseek-ai/DeepSeek-V4-Flash --attention-backend MLA_SUITE_DSV4

vLLM's code of these models names its attention class and its kernels itself and asks no selector. So `plugins.vllm`
registers this module's models in the place of vLLM's own. They are vLLM's own classes; asking for one changes what its
module names, and that only where the flag is given: on CUDA decode and prefill are then functions of
`mla_suite.integrations.flash_mla`, on ROCm decode is that of `vllm_rocm`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from mla_suite.integrations import needs, refuse, vllm_rocm, vllm_v41
from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from mla_suite.integrations.plugins import V4_MODELS, V4_NAME

with needs("vLLM 0.32 or newer", __name__, "sparse_decode from a layer of your own"):
    from vllm import envs
    from vllm.platforms import current_platform

    from mla_suite.integrations import vllm_interface

HEADS = 8, 16, 32, 64, 128
"""Head counts for which vLLM's fused writer of queries and keys has an instance."""
_SELECT = "_select_dsv4_attn_cls"


def __getattr__(name: str) -> Any:
    """vLLM's model class of this name, whose code then takes our attention where the flag asks for it."""
    if name in V4_MODELS:
        package = V4_MODELS[name]
        if current_platform.is_rocm():
            _offer_on_rocm(package)
        elif current_platform.is_cuda():
            offer(import_module(f"{package}.nvidia.model"), import_module(f"{package}.nvidia.flashmla"))
        return getattr(import_module(package), name)
    if name == "MLASuiteV4Backend":  # what vLLM's selector asks for, which the layers of other models go through
        possible = f"{V4_NAME} is for DeepSeek V4 and V4.1: choose CUSTOM, or MLA_SUITE_SPARSE with an indexer"
        refuse("vllm_v4", "a layer of another model asks for its backend", possible)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def padded_heads(num_heads: int) -> int:
    """The heads with which queries and results are laid out: vLLM's writer knows no others."""
    found = next((heads for heads in HEADS if num_heads <= heads), None)
    if found is None:
        possible = f"vLLM's writer lays out at most {HEADS[-1]}: raise --tensor-parallel-size"
        refuse("vllm_v4", f"a rank has {num_heads} heads", possible)
    return found


def offer(model_code: ModuleType, kernels: ModuleType) -> None:
    """Have the decoder layers of `model_code` take our class where the flag asks, as they ask their own function."""

    def ours(vllm_config: Any) -> type:
        if current_platform.is_device_capability_family(100):
            possible = (
                "its kernels are for H100 and H200, V4.1's records on this GPU are others: choose another backend"
            )
            refuse("vllm_v4", f"--attention-backend {V4_NAME} is given on SM100", possible, NotImplementedError)
        if vllm_v41.asked(vllm_config):
            vllm_v41.take_records(vllm_interface.__version__, kernels)
        return attention_class(kernels)

    _choose(model_code, kernels, ours)


def _choose(model_code: ModuleType, kernels: ModuleType, ours: Callable[[Any], type]) -> None:
    """Have the function that chooses the class of `model_code`'s layers ask `ours` where the flag is given."""
    theirs = getattr(model_code, _SELECT)
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def select(vllm_config: Any) -> type:
        if not _asked(vllm_config, kernels):
            chosen: type = theirs(vllm_config)
            return chosen
        check(vllm_config)
        return ours(vllm_config)

    setattr(model_code, _SELECT, select)


@cache
def attention_class(kernels: ModuleType) -> type:
    """vLLM's FlashMLA class of V4 or V4.1 whose two kernels are ours from now on, in this process."""
    interface = vllm_interface.installed("vllm_v4")
    interface.has(kernels.__name__, kernels, ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"))
    base = kernels.DeepseekV4FlashMLAAttention
    interface.has(base.__name__, base, ("get_padded_num_q_heads", "_forward_decode", "_forward_prefill"))
    interface.warn_if_newer(stacklevel=3)
    prefill = partial(flash_mla_sparse_fwd, return_log2_lse=False)
    kernels.flash_mla_with_kvcache = _invariant(flash_mla_with_kvcache)  # type: ignore[attr-defined]
    kernels.flash_mla_sparse_fwd = _invariant(prefill)  # type: ignore[attr-defined]

    class MLASuiteV4Attention(base):  # type: ignore[misc, valid-type]
        @classmethod
        def get_padded_num_q_heads(cls, num_heads: int) -> int:
            return padded_heads(num_heads)

    return MLASuiteV4Attention


def _offer_on_rocm(package: str) -> None:
    model_code, kernels = import_module(f"{package}.amd.model"), import_module(f"{package}.amd.rocm")
    if hasattr(model_code, _SELECT):  # V4.1

        def ours(vllm_config: Any) -> type:
            take_decode_on_rocm(kernels)
            chosen: type = kernels.DeepseekV41ROCMAiterMLAAttention
            return chosen

        _choose(model_code, kernels, ours)
        return
    base = model_code.DeepseekV4ROCMAiterMLAAttention
    if base.__name__ == "MLASuiteV4RocmAttention":
        return

    class MLASuiteV4RocmAttention(base):  # type: ignore[misc, valid-type]
        """V4's layers name their class, so the class itself looks at the flag."""

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            if _asked(vllm_config, kernels):
                check(vllm_config)
                take_decode_on_rocm(kernels)
            super().__init__(vllm_config, *args, **kwargs)

    model_code.DeepseekV4ROCMAiterMLAAttention = MLASuiteV4RocmAttention  # type: ignore[attr-defined]


def take_decode_on_rocm(kernels: ModuleType) -> None:
    """Have vLLM's class for ROCm decode through our function, and not through AITER's beside it."""
    interface = vllm_interface.installed("vllm_v4")
    interface.has(kernels.__name__, kernels, (vllm_rocm.NAME, "_aiter_sparse_mla_enabled"))
    interface.warn_if_newer(stacklevel=3)
    kernels.rocm_sparse_attn_decode = _invariant(vllm_rocm.rocm_sparse_attn_decode)  # type: ignore[attr-defined]
    kernels._aiter_sparse_mla_enabled = lambda *_: False  # type: ignore[attr-defined]


def _invariant(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, batch-invariant where vLLM is asked to be, which calls FlashMLA's without saying so."""
    return partial(function, enable_batch_invariant=True) if envs.VLLM_BATCH_INVARIANT else function


def _asked(vllm_config: Any, kernels: ModuleType) -> bool:
    """Whether the flag is given. vLLM gives draft layers no backend of their own: they follow the model's."""
    backend = vllm_config.attention_config.backend
    if backend is None:
        for ours in (flash_mla_with_kvcache, vllm_rocm.rocm_sparse_attn_decode):
            found = getattr(kernels, ours.__name__, None)
            if getattr(found, "func", found) is ours:
                return True
        return False
    name: str = backend.name
    return name == V4_NAME


def check(vllm_config: Any) -> None:
    """NotImplementedError, in a sentence, for what a server with this backend does not do."""
    flag = f"it is not done with --attention-backend {V4_NAME}"
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        size = vllm_config.parallel_config.prefill_context_parallel_size
        refuse("vllm_v4", f"--prefill-context-parallel-size is {size}", f"{flag}: leave it at 1", NotImplementedError)
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        refuse("vllm_v4", "--kv-transfer-config is given", f"{flag}: serve without it", NotImplementedError)
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        refuse("vllm_v4", "HiSparse is switched on", f"{flag}: serve without it", NotImplementedError)
    if current_platform.is_rocm() and vllm_v41.asked(vllm_config):
        possible = f"vLLM's writers for ROCm store 584 bytes: unset {vllm_v41.RECORDS}, leave --kv-cache-dtype at fp8"
        refuse("vllm_v4", "V4.1's records of 528 or 288 bytes are asked for", possible, NotImplementedError)
    if current_platform.is_rocm() and envs.VLLM_ROCM_MONO_DECODE:
        possible = "its fused layers call no kernel of another backend: unset it"
        refuse("vllm_v4", "VLLM_ROCM_MONO_DECODE is set", possible, NotImplementedError)
