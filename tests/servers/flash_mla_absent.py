"""A module in the place of the library `flash_mla`, whose kernels are for GPUs alone: import this before SGLang.

Its functions raise: where SGLang would call one of them, ours must have taken its place.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class FlashMLASchedMeta:
    """The library's holder, whose fields SGLang's code asks about."""

    def __init__(self) -> None:
        self.have_initialized = False
        self.config = self.tile_scheduler_metadata = self.num_splits = None


def _absent(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"flash_mla.{name} needs a GPU, and was called in the place of ours")

    return call


def _library() -> None:
    package, interface = ModuleType("flash_mla"), ModuleType("flash_mla.flash_mla_interface")
    for name in ("fused_norm_rope_attn_rope_cast", "flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        setattr(package, name, _absent(name))
    package.get_mla_metadata = lambda: (FlashMLASchedMeta(), None)
    package.flash_mla_interface, interface.FlashMLASchedMeta = interface, FlashMLASchedMeta
    sys.modules.update({"flash_mla": package, "flash_mla.flash_mla_interface": interface})


_library()
