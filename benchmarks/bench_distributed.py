"""A layer and a long context over two or more GPUs, beside one GPU in the same run.

    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py [--csv FILE]

Tensor parallel: a decode step of DeepSeek V3's attention layer (hidden 7168, 128 heads, batch 128, bf16), compiled with
fullgraph and captured in a CUDA graph. Context parallel: attention of one sequence of 128 heads over its keys dealt to
the ranks, compiled and captured likewise. Each result is compared with one GPU's before it is timed. The time is that
of a graph of equal calls divided by their number; the slowest rank counts. Collectives are timed alone as well, through
peer memory and through NCCL, with the bytes that a rank sends.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import mla_suite
from mla_suite.bench.saving import Table
from mla_suite.distributed import ContextParallelCache, Parallel, ParallelMLA, cp_decode, peer_memory
from mla_suite.distributed.context import merge_ranks
from mla_suite.distributed.parallel import gather, initialise
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step, cos_sin_table

FULL = MLAConfig(hidden_size=7168, num_heads=128, q_lora_rank=1536, max_position=8192)
BATCH, PAGE = 128, 64
LAYER_LENGTHS = (512, 4096)
CONTEXTS = (262_144, 1_048_576)
CALLS, REPLAYS = 20, 15


def graph_us(call: Callable[[], object]) -> float:
    """Microseconds of a call in a captured graph, the slowest rank's; every rank must call this alike."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def fill(cache: PagedLatentCache | ContextParallelCache, lengths: list[int], seed: int) -> Step:
    """Random latents in every page; -> the step of one new token per sequence."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for layer in cache.layers:
        layer.normal_(generator=generator)
    sequences = [cache.allocate(length) for length in lengths]
    cache.append(sequences, [length - 1 for length in lengths])
    return cache.append(sequences, [1] * len(lengths))


def layer_rows(parallel: Parallel, device: torch.device) -> Iterator[dict[str, Any]]:
    """The layer on one GPU and tensor parallel over all of them."""
    torch.manual_seed(0)
    whole = MLA(FULL, dtype=torch.bfloat16, device=device).requires_grad_(False)
    for parameter in whole.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    whole.fuse()
    spread = ParallelMLA(FULL, parallel, dtype=torch.bfloat16, device=device).requires_grad_(False)
    spread.load_full_weights(whole.state_dict())
    table = cos_sin_table(FULL, device=device)
    for kv_len in LAYER_LENGTHS:
        cache = PagedLatentCache(1, BATCH * -(-kv_len // PAGE), PAGE, device=device)
        step = fill(cache, [kv_len] * BATCH, seed=kv_len)  # the same on all ranks
        x = torch.randn(BATCH, 1, FULL.hidden_size, device=device, generator=torch.Generator(device).manual_seed(1))
        x = x.bfloat16()
        torch._dynamo.reset()
        alone, together = (torch.compile(layer.decode, fullgraph=True) for layer in (whole, spread))
        arguments = x, cache.layers[0], step, table
        error = relative(together(*arguments), alone(*arguments))
        assert error < 2e-2, error
        one, many = graph_us(partial(alone, *arguments)), graph_us(partial(together, *arguments))
        torch._dynamo.reset()
        with through_nccl():
            together(*arguments)
            nccl = graph_us(partial(together, *arguments))
        what = f"layer B{BATCH} kv {kv_len}"
        yield {"what": what, "one_us": one, "many_us": many, "nccl_us": nccl, "error": error}


def context_rows(parallel: Parallel, device: torch.device) -> Iterator[dict[str, Any]]:
    """One sequence of 128 heads: all keys on one GPU, and dealt to the ranks."""
    shard = parallel.shard(PAGE)
    for kv_len, q_len in ((CONTEXTS[0], 1), (CONTEXTS[0], 4), (CONTEXTS[1], 1)):
        pages = kv_len // PAGE
        generator = torch.Generator(device).manual_seed(kv_len)
        cache = torch.randn(pages, PAGE, 576, device=device, generator=generator, dtype=torch.bfloat16)
        q = torch.randn(1, q_len, 128, 576, device=device, generator=generator).bfloat16()
        dist.broadcast(cache, 0)
        dist.broadcast(q, 0)
        own = cache[shard.rank :: shard.world].contiguous()  # whole pages are dealt in turn
        lens = torch.tensor([kv_len], dtype=torch.int32, device=device)
        table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        own_table = table[:, : own.shape[0]].contiguous()
        torch._dynamo.reset()

        own_lens = shard.local_lens(lens)  # a step has them once for all layers

        @torch.compile(fullgraph=True)
        def alone(q: torch.Tensor, cache: torch.Tensor, lens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return mla_suite.decode(q, cache, lens, table, softmax_scale=192**-0.5, max_seqlen_q=q.shape[1])[0]

        @torch.compile(fullgraph=True)
        def spread(
            q: torch.Tensor, cache: torch.Tensor, lens: torch.Tensor, own_lens: torch.Tensor, table: torch.Tensor
        ) -> torch.Tensor:
            group, scale = parallel.cp_group, 192**-0.5
            options: dict[str, Any] = dict(shard=shard, group=group, local_seq_lens=own_lens, softmax_scale=scale)
            return cp_decode(q, cache, lens, table, **options)[0]

        mine, exact = spread(q, own, lens, own_lens, own_table), alone(q, cache, lens, table)
        heads = 128 // shard.world
        error = relative(mine, exact[:, :, shard.rank * heads : (shard.rank + 1) * heads])
        assert error < 1e-2, error
        one = graph_us(partial(alone, q, cache, lens, table))
        many = graph_us(partial(spread, q, own, lens, own_lens, own_table))
        half = graph_us(partial(alone, q, own, own_lens, own_table)) if q_len == 1 else None
        torch._dynamo.reset()
        with through_nccl():
            spread(q, own, lens, own_lens, own_table)
            nccl = graph_us(partial(spread, q, own, lens, own_lens, own_table))
        what = f"decode B1 H128 q_len {q_len} kv {kv_len}"
        yield {"what": what, "one_us": one, "many_us": many, "nccl_us": nccl, "own_keys_us": half, "error": error}
        del cache, own
        torch.cuda.empty_cache()


@contextmanager
def through_nccl() -> Iterator[None]:
    """Collectives go through NCCL, as between hosts."""
    capacities = dict(peer_memory._capacities)
    peer_memory._capacities.clear()
    try:
        yield
    finally:
        peer_memory._capacities.update(capacities)


def collective_rows(parallel: Parallel, device: torch.device) -> Iterator[dict[str, Any]]:
    """The collectives of a step alone: what the link and the wait for the other rank cost."""
    own_heads = 128 // parallel.world
    for tokens in (1, 32, 128):
        hidden = torch.randn(tokens, 7168, device=device).bfloat16()
        out = torch.randn(tokens, 1, 128, 512, device=device).bfloat16()
        lse = torch.randn(tokens, 1, 128, device=device)
        queries = torch.randn(tokens, own_heads, 576, device=device).bfloat16()
        shard, group = parallel.shard(), parallel.cp_group
        sent = (parallel.world - 1) * tokens
        cases: dict[str, tuple[Callable[[], object], int]] = {
            f"sum {tokens} x 7168 bf16": (partial(parallel.sum_over_all, hidden), sent * 7168 * 2),
            f"merge {tokens} x 128 x 512 bf16": (partial(merge_ranks, out, lse, shard, group), sent * own_heads * 1028),
            f"gather {tokens} x 128 x 576 bf16": (
                partial(gather, queries, group, shard.world),
                sent * own_heads * 1152,
            ),
        }
        for what, (call, sent_bytes) in cases.items():
            peers = graph_us(call)
            with through_nccl():
                nccl = graph_us(call)
            yield {"what": what, "many_us": peers, "nccl_us": nccl, "sent_bytes": sent_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="write the rows to this file as they come")
    arguments = parser.parse_args()
    device = initialise()
    world = dist.get_world_size()
    if device.type != "cuda":
        raise SystemExit("bench_distributed: needs one GPU per rank; the demo command runs on CPUs")
    tp = Parallel.create(tp_size=world, device_type="cuda")
    cp = Parallel.create(cp_size=world, device_type="cuda")
    about = {
        "device": f"{world} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "date": f"{date.today()}",
        "command": f"torchrun --nproc-per-node {world} benchmarks/bench_distributed.py --csv FILE",
    }
    table = Table(arguments.csv if dist.get_rank() == 0 else None, about)
    with torch.inference_mode():
        for row in chain(collective_rows(cp, device), layer_rows(tp, device), context_rows(cp, device)):
            table.add(row)
            if dist.get_rank() == 0:
                report(row, world)
    dist.destroy_process_group()


def report(row: dict[str, Any], world: int) -> None:
    one = f"{row['one_us']:9.1f} us on one, {row['many_us'] / row['one_us']:.3f}x" if "one_us" in row else ""
    print(f"{row['what']:36}{row['many_us']:9.1f} us on {world}, NCCL {row['nccl_us']:.1f} {one}", flush=True)


if __name__ == "__main__":
    main()
