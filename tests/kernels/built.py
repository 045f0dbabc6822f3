"""Kernels that a test needs to be built."""

from __future__ import annotations

import pytest

from mla_suite.launch import has_kernel

PLAIN_DECODE = "decode_dtype-bf16_rows-16_width-576_rotate-0"


def require_built(arch: str, *instances: str) -> None:
    """Skips the test where one of an arch's instances, or its plainest decode if none is named, is not built."""
    for instance in instances or (PLAIN_DECODE,):
        if not has_kernel(arch, instance):
            pytest.skip(f"{instance} is not built for {arch}; run `python -m mla_suite build --arch {arch}`")
