"""GPU MODE's `amd-mla-decode` (2025) at its four benchmark sizes, beside the task's speed-of-light analysis.

    python benchmarks/bench_gpu_mode.py [--kv 512,2048,4096,6144]

The layer is the task's own: batch 128, no norms, rope by halves with a bf16 table, a contiguous cache of 8192 rows per
sequence that keeps k_pe un-rotated. On a GPU a step is timed as one replay of a CUDA graph, after check mode compared
its operators with their definitions, and the last line is the geometric mean by which the task ranks.

On any machine the emulator counts what decode and combine cost an MI300X at batch 128, with a plan. Reading the weights
once, 374 MB at 5.3 TB/s, is added to it. Both are clocks of a compute unit, and a bound, never a time; the published
microseconds are printed as clocks too, at 2.1 GHz. At prefill 512 the published time is below what the weights alone
take from HBM, so that it asks for weights that stay in the 256 MB cache.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import mla_suite
from mla_suite import archs
from mla_suite.bench import sets, timer
from mla_suite.bench.saving import Table
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import counted_bounds

ROOFLINE_US = {512: 54.62, 2048: 141.16, 4096: 210.75, 6144: 280.87}
"""By prefill: the task's speed of light of a step, on an MI300."""
BEST_US = 112904.773
"""The first place of the task's ranking: a geometric mean over the four sizes, measured by the task's own host code."""
ARCH, BATCH = archs.get("gfx942"), 128
EFFORT = timer.Effort(rounds=3)
SHOWN = ("prefill", "roofline_us", "roofline_clocks", "attention", "weights", "bound", "limit")


def weight_bytes(config: MLAConfig) -> int:
    with torch.device("meta"):
        layer = MLA(config, kv_format="bf16", dtype=torch.bfloat16)
    return sum(parameter.nbytes for parameter in layer.parameters())


def bound(prefill: int) -> dict[str, Any]:
    """The columns of SHOWN, counted in the emulator; ValueError when the kernels' result is not right."""
    (case,) = (case for case in sets.named("gpu-mode-2025-layer") if case.facts["kv_len"] == prefill + 1)
    found = counted_bounds.count(case, ARCH.name)
    if found.failure:
        raise ValueError(f"{case.id}: {found.failure}")
    limit, clocks_per_s = counted_bounds.limiter(found.clocks), ARCH.clock_mhz * 1e6
    attention = found.clocks[limit]
    weights = weight_bytes(MLAConfig.gpu_mode_2025()) / ARCH.memory_bytes_per_s * clocks_per_s
    us = ROOFLINE_US[prefill]
    row = (prefill, us, us * ARCH.clock_mhz, attention, weights, attention + weights, limit)
    return dict(zip(SHOWN, row, strict=True))


def make_layer(device: torch.device, batch: int) -> tuple[MLA, PagedLatentCache, list[int], torch.Tensor]:
    """The task's layer with random weights, its empty cache and its rope table."""
    config = MLAConfig.gpu_mode_2025()
    layer = MLA(config, kv_format="bf16", dtype=torch.bfloat16, device=device).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    layer.o_proj.weight.mul_(math.sqrt(layer.o_proj.in_features / config.hidden_size))
    cache, sequences = PagedLatentCache.contiguous(1, batch, config.max_position, device=device)
    return layer, cache, sequences, cos_sin_table(config, device=device, dtype=torch.bfloat16)


def times(lengths: Sequence[int], device: torch.device) -> Iterator[tuple[int, float]]:
    """(prefill, microseconds) of a step; each writes the same token into the same row."""
    torch.manual_seed(97)
    layer, cache, sequences, cos_sin = make_layer(device, BATCH)
    kv_cache = cache.layers[0]
    for prefill in sorted(lengths):
        cache.append(sequences, [prefill - cache.length(sequences[0])] * BATCH)
        kv_cache[:, :prefill].normal_()
        x = torch.randn(BATCH, 1, layer.config.hidden_size, device=device).bfloat16()
        inputs = (x, kv_cache, cache.append(sequences, [1] * BATCH))
        with mla_suite.check(1, on_difference="raise"):
            layer.decode(*inputs, cos_sin)
        rounds = timer.device_rounds(lambda turn: layer.decode(*turn, cos_sin), [inputs], EFFORT)
        yield prefill, timer.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", default=",".join(map(str, ROOFLINE_US)), help="the task's sizes (default: all)")
    given = parser.parse_args().kv.split(",")
    if unknown := set(given) - set(map(str, ROOFLINE_US)):
        raise SystemExit(f"--kv {min(unknown)}: the task's sizes are {', '.join(map(str, ROOFLINE_US))}")
    lengths = sorted(map(int, given))
    bounds, rows = Table(None, shown=SHOWN), list[dict[str, Any]]()
    for kv in lengths:
        rows.append(bound(kv))
        bounds.add(rows[-1])
    means = [geometric_mean(row[name] for row in rows) for name in ("roofline_us", "roofline_clocks", "bound")]
    print("geometric mean {:.2f} us, {:.0f} clocks; bound {:.0f} clocks".format(*means))
    print(f"first place of the ranking: {BEST_US:.0f} us")
    if not torch.cuda.is_available():
        print("no GPU here: nothing was timed")
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    table, timed = Table(None, shown=("prefill", "us", "of_roofline")), []
    with torch.no_grad():
        for kv, us in times(lengths, torch.device("cuda")):
            timed.append(us)
            table.add({"prefill": kv, "us": us, "of_roofline": us / ROOFLINE_US[kv]})
    print(f"geometric mean {geometric_mean(timed):.2f} us")


if __name__ == "__main__":
    main()
