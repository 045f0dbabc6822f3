"""Debug mode: value checks that read device data (page ids, lengths, slots) before an operator writes anything.

Off by default because reading lengths on the host would wait for the device. `MLA_SUITE_DEBUG=1` turns it on for a
process (read once at import), `with mla_suite.debug():` for a block. Tensors on the CPU are always checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_enabled: ContextVar[bool] = ContextVar("mla_suite_debug", default=os.environ.get("MLA_SUITE_DEBUG", "0") == "1")


enabled: Callable[[], bool] = _enabled.get  # without a frame of Python's: every call of an operator asks


@contextmanager
def debug(on: bool = True) -> Iterator[None]:
    """Check values inside tensors as well as metadata while the block runs; costs a device synchronisation per call."""
    token = _enabled.set(on)
    try:
        yield
    finally:
        _enabled.reset(token)
