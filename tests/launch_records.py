"""Launches recorded in place of a driver: what it would be given, for tests without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from mla_suite.launch import launcher, tensor_map


class Recorded(NamedTuple):
    """One launch; `buffers` are the tensors that it may touch, by name."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    smem: int
    overlap: bool
    params: bytes
    buffers: dict[str, torch.Tensor]


def record(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The list that launches go to from now on, instead of to a device."""
    found: list[Recorded] = []

    def bind(kernel, grid, threads, smem, overlap):
        def start(params, buffers):
            named = {buffer.name: buffer.tensor for buffer in buffers}
            found.append(Recorded(kernel, grid, threads, smem, overlap, params, named))

        return start

    driver = SimpleNamespace(checks_buffers=True, bind=bind)
    monkeypatch.setattr(launcher, "find", lambda op, kernel, tensor: (driver, kernel))
    return found


def mapped_to(monkeypatch: pytest.MonkeyPatch, words) -> None:
    """Has tensor maps made by `words(address, dtype, sizes, strides, box)`."""
    monkeypatch.setattr(tensor_map, "swizzled", words)
