"""Scratch for split partials: one buffer per thread, device and stream, grown outside capture, never shared.

Two threads that share a stream could interleave one's decode with the other's combine, so each has its own buffer.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch


class _Kept(threading.local):
    """A thread's buffers: one per (device, stream) of GPUs, and one for the CPU."""

    def __init__(self) -> None:
        self.gpu: dict[tuple[int, int], torch.Tensor] = {}
        self.cpu: torch.Tensor | None = None


_kept = _Kept()
BYTE_LIMIT = 8 * 2**30  # a tenth of an H100's memory; 63 splits of 512 sequences with 128 heads
_GROWTH_BYTES = 1 << 20  # buffers grow in whole MiB, so that slowly rising lengths do not reallocate at every call


def take(device: torch.device, elements: int) -> torch.Tensor:
    """fp32 scratch of at least `elements`, uninitialised, valid until this thread's next `take` on device and stream.

    While the current stream is captured the memory is a plain allocation, which comes from the graph's own pool.
    ValueError above BYTE_LIMIT, before anything is allocated.
    """
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            _check_size(elements)
            return torch.empty(elements, dtype=torch.float32, device=device)
        index = torch.cuda.current_device() if device.index is None else device.index
        key = index, torch._C._cuda_getCurrentRawStream(index)
        buffer = _kept.gpu.get(key)
        if buffer is None or buffer.numel() < elements:
            _check_size(elements)
            # The old buffer goes back to torch's allocator, which hands it out again in this stream's order.
            buffer = _kept.gpu[key] = _grown_aside(device, elements)
        return buffer
    if device.type != "cpu":
        raise ValueError(f"scratch: device {device} is neither cpu nor cuda")
    if _kept.cpu is None or _kept.cpu.numel() < elements:
        _check_size(elements)
        _kept.cpu = _grown(device, elements)
    return _kept.cpu


def partials(device: torch.device, splits: int, rows: int, dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial_out [splits, rows, dim_v], partial_lse [splits, rows]), fp32 and uninitialised; see `take`."""
    outs, lses = splits * rows * dim_v, splits * rows
    buffer = take(device, outs + lses)
    return buffer[:outs].view(splits, rows, dim_v), buffer[outs : outs + lses].view(splits, rows)


def release() -> None:
    """Returns this thread's buffers to torch's allocator."""
    _kept.gpu.clear()
    _kept.cpu = None


def _check_size(elements: int) -> None:
    if elements * 4 > BYTE_LIMIT:
        raise ValueError(
            f"scratch: partial results of this call would take {elements * 4} bytes; at most {BYTE_LIMIT}: call with "
            "fewer sequences or query tokens, a smaller max_seqlen_kv or block_table, or fewer or larger splits"
        )


def _grown(device: torch.device, elements: int) -> torch.Tensor:
    bytes_wanted = -(-elements * 4 // _GROWTH_BYTES) * _GROWTH_BYTES
    return torch.empty(bytes_wanted // 4, dtype=torch.float32, device=device)


def _grown_aside(device: torch.device, elements: int) -> torch.Tensor:
    """Allocates on another thread, for the same stream.

    A thread's allocations may go to the pool of a graph that it is about to capture (Inductor arranges this while it
    warms up). A buffer that outlives the call must not lie there: the graph would reuse its memory.
    """
    stream = torch.cuda.current_stream(device)

    def allocate() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return _grown(device, elements)

    with ThreadPoolExecutor(1) as aside:
        return aside.submit(allocate).result()
