"""Types of arguments that several commands take; each refuses in a sentence."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def torch_device(text: str) -> torch.device:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ArgumentTypeError(f"{text!r} is no torch device; cpu, cuda and cuda:1 are some") from error
    there = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= there):
        raise ArgumentTypeError(f"{text!r} is not here; this machine has cpu and {there} GPUs that torch can use")
    return device


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}; it is a number, 1 at least")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    """Numbers between commas."""
    return tuple(positive(part.strip()) for part in text.split(","))
