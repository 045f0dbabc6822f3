"""Scratch for split partials: one buffer per (device, stream), grown outside capture, never shared by streams."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_local = threading.local()
_buffers: dict[tuple[int, int], torch.Tensor] = {}
_lock = threading.Lock()
_GRANULE = 1 << 20  # growth in whole MiB, so that slowly rising lengths do not reallocate at every call


def take(device: torch.device, elements: int) -> torch.Tensor:
    """fp32 scratch of at least `elements`, uninitialised, valid until the next `take` on the same device and stream.

    While the current stream is captured the memory is a plain allocation, which comes from the graph's own pool.
    """
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(elements, dtype=torch.float32, device=device)
        index = torch.cuda.current_device() if device.index is None else device.index
        key = index, torch._C._cuda_getCurrentRawStream(index)
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() < elements:
            with _lock:
                # The old buffer goes back to torch's allocator, which hands it out again in this stream's order.
                buffer = _buffers[key] = _grown_aside(device, elements)
        return buffer
    if device.type != "cpu":
        raise ValueError(f"scratch: device {device} is neither cpu nor cuda")
    buffer = getattr(_local, "buffer", None)  # a CPU thread runs its kernels one after the other
    if buffer is None or buffer.numel() < elements:
        buffer = _local.buffer = _grown(device, elements)
    return buffer


def partials(device: torch.device, splits: int, rows: int, dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial_out [splits, rows, dim_v], partial_lse [splits, rows]), fp32 and uninitialised; see `take`."""
    return shaped(take(device, splits * rows * (dim_v + 1)), splits, rows, dim_v)


def shaped(buffer: torch.Tensor, splits: int, rows: int, dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `partials` gives, in a buffer that was taken for splits x rows x (dim_v + 1) values: lse lies behind out."""
    outs, lses = splits * rows * dim_v, splits * rows
    return buffer[:outs].view(splits, rows, dim_v), buffer[outs : outs + lses].view(splits, rows)


def release() -> None:
    """Gives every GPU buffer, and this thread's CPU buffer, back to torch."""
    with _lock:
        _buffers.clear()
    _local.buffer = None


def _grown(device: torch.device, elements: int) -> torch.Tensor:
    bytes_wanted = -(-elements * 4 // _GRANULE) * _GRANULE
    return torch.empty(bytes_wanted // 4, dtype=torch.float32, device=device)


def _grown_aside(device: torch.device, elements: int) -> torch.Tensor:
    """Allocates on another thread, for the same stream.

    A thread may have its allocations sent to the pool of a graph that it is about to capture (Inductor does so while it
    warms up). A buffer that outlives the call must not lie there: the graph would reuse its memory.
    """
    stream = torch.cuda.current_stream(device)

    def allocate() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return _grown(device, elements)

    with ThreadPoolExecutor(1) as aside:
        return aside.submit(allocate).result()
