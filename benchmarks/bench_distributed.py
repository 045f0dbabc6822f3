"""A layer and a long context over two or more GPUs, beside one GPU in the same run.

    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py [--csv FILE]
    torchrun --nproc-per-node 8 benchmarks/bench_distributed.py --batches 128 --lengths 4096 --contexts 4194304

Layers: a decode step of DeepSeek V3's attention layer (hidden 7168, 128 heads, bf16), spread over all ranks in every
way: tensor parallel (TP), context parallel (CP), both at once, and data parallel (DP), where each rank has a part of
the batch. Contexts: attention of one sequence of 128 heads over its keys dealt to the ranks. Both are compiled with
fullgraph and captured in a CUDA graph, and each result is compared with one GPU's before it is timed. The time is that
of a graph of equal calls divided by their number; the slowest rank counts. Collectives are timed alone as well, through
peer memory and through NCCL, with the bytes that a rank sends in one exchange, and every rank's sum must have the same
bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, product, repeat
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from definition import relative

import mla_suite
from mla_suite.bench import environment
from mla_suite.bench.saving import Table
from mla_suite.bench.timer import queued_us
from mla_suite.cli import writable
from mla_suite.distributed import ContextParallelCache, KeyShard, Parallel, ParallelMLA, cp_decode, peer_memory
from mla_suite.distributed.context import merge_ranks
from mla_suite.distributed.parallel import gather, initialise
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, Step, cos_sin_table

FULL = MLAConfig(hidden_size=7168, num_heads=128, q_lora_rank=1536, max_position=32_768)
PAGE = 64
BATCHES, LENGTHS, CONTEXTS = [32, 128], [512, 4096, 32_768], [262_144, 1_048_576, 4_194_304]
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
        times.append(queued_us(graph.replay) / CALLS)
    slowest = torch.tensor(median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def checked(found: torch.Tensor, exact: torch.Tensor, bound: float) -> float:
    """The relative error of a result, which must be below the bound on every rank."""
    error = relative(found, exact)
    if not error < bound:
        raise SystemExit(f"bench_distributed: rank {dist.get_rank()}: error {error:.3g}, and {bound} is allowed")
    return error


def fill(cache: PagedLatentCache | ContextParallelCache, lengths: list[int]) -> Step:
    """Room for every token of the lengths; -> the step of one new token per sequence, the last."""
    sequences = [cache.allocate(length) for length in lengths]
    cache.append(sequences, [length - 1 for length in lengths])
    return cache.append(sequences, [1] * len(lengths))


def deal(whole: torch.Tensor, step: Step, own: torch.Tensor, own_step: Step, shard: KeyShard) -> None:
    """Copies the pages that a rank owns from one GPU's cache; runs of keys are whole pages."""
    pages = step.block_table[:, shard.rank :: shard.world]
    own[own_step.block_table[:, : pages.shape[1]].flatten().long()] = whole[pages.flatten().long()]


def full_layer(device: torch.device) -> MLA:
    torch.manual_seed(0)
    whole = MLA(FULL, dtype=torch.bfloat16, device=device).requires_grad_(False)
    for parameter in whole.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    whole.fuse()
    return whole


def layer_rows(
    ways: list[Parallel], batches: list[int], lengths: list[int], device: torch.device
) -> Iterator[dict[str, Any]]:
    """The layer on one GPU, and spread over all of them in every way; DP gives each rank its part of the batch."""
    whole, table = full_layer(device), cos_sin_table(FULL, device=device)
    layers = [ParallelMLA(FULL, way, interleave=PAGE, dtype=torch.bfloat16, device=device) for way in ways]
    for layer in layers:
        layer.requires_grad_(False).load_full_weights(whole.state_dict())
    world, rank = dist.get_world_size(), dist.get_rank()
    for batch, kv_len in product(batches, lengths):
        cache = PagedLatentCache(1, batch * -(-kv_len // PAGE), PAGE, device=device)
        generator = torch.Generator(device).manual_seed(kv_len)  # the same on all ranks
        cache.layers[0].normal_(generator=generator)
        step = fill(cache, [kv_len] * batch)
        x = torch.randn(batch, 1, FULL.hidden_size, device=device, generator=generator).bfloat16()
        exact, one = timed(whole.decode, x, cache.layers[0], step, table)
        shown = {"what": f"layer B{batch} kv {kv_len}", "one_us": one}
        for way, layer in zip(ways, layers, strict=True):
            own = ContextParallelCache(
                1, batch * -(-kv_len // (PAGE * way.cp_size)), PAGE, shard=layer.shard, device=device
            )
            own_step = fill(own, [kv_len] * batch)
            deal(cache.layers[0], step, own.layers[0], own_step, layer.shard)
            found, many = timed(layer.decode, x, own.layers[0], own_step, table)
            error = checked(found, exact, 2e-2)
            row = {"split": name_of(way), "many_us": many, "error": error}
            if way.cp_size == 1:
                with through_nccl():
                    row["nccl_us"] = timed(layer.decode, x, own.layers[0], own_step, table)[1]
            yield shown | row
        if batch % world == 0:
            mine = slice(rank * (batch // world), (rank + 1) * (batch // world))
            own_step = Step(step.block_table[mine], step.seq_lens[mine], step.slot_mapping[mine], step.positions[mine])
            found, many = timed(whole.decode, x[mine], cache.layers[0], own_step, table)
            yield shown | {"split": f"DP{world}", "many_us": many, "error": checked(found, exact[mine], 2e-2)}


def timed(layer: Callable[..., torch.Tensor], *arguments: Any) -> tuple[torch.Tensor, float]:
    """A layer compiled for these arguments alone: what it gives, and the microseconds of a captured call."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    return compiled(*arguments).clone(), graph_us(partial(compiled, *arguments))


def name_of(way: Parallel) -> str:
    sizes = {"TP": way.tp_size, "CP": way.cp_size}
    return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def context_rows(parallel: Parallel, contexts: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """One sequence of 128 heads: all keys on one GPU, and dealt to the ranks."""
    shard = parallel.shard(PAGE)
    for kv_len, q_len in chain(((contexts[0], 4),), zip(contexts, repeat(1))) if contexts else ():
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
        error = checked(mine, exact[:, :, shard.rank * heads : (shard.rank + 1) * heads], 1e-2)
        one = graph_us(partial(alone, q, cache, lens, table))
        many = graph_us(partial(spread, q, own, lens, own_lens, own_table))
        own_keys = graph_us(partial(alone, q, own, own_lens, own_table)) if q_len == 1 else None
        torch._dynamo.reset()
        with through_nccl():
            spread(q, own, lens, own_lens, own_table)
            nccl = graph_us(partial(spread, q, own, lens, own_lens, own_table))
        what = f"decode B1 H128 q_len {q_len} kv {kv_len}"
        times = {"one_us": one, "many_us": many, "nccl_us": nccl, "own_keys_us": own_keys}
        yield {"what": what, "split": name_of(parallel), **times, "error": error}
        del cache, own
        torch.cuda.empty_cache()


def through_nccl() -> AbstractContextManager[object]:
    """Collectives go through NCCL, as between hosts."""
    return mock.patch.dict(peer_memory._capacities, clear=True)


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
        same_bits(parallel.sum_over_all(hidden))
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
            row = {"what": what, "many_us": peers, "nccl_us": nccl, "sent_bytes": sent_bytes}
            if what.startswith("sum"):
                for name, limit in (("one", 2**62), ("two", -1)):  # exchanges, by the bytes above which there are two
                    with mock.patch.object(peer_memory, "SECOND_EXCHANGE_BYTES", limit):
                        row[f"in_{name}_us"] = graph_us(call)
            yield row


def same_bits(found: torch.Tensor) -> None:
    """Ends the program where the ranks' results differ in a bit."""
    everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, found)
    if not all(torch.equal(one, found) for one in everyone):
        raise SystemExit(f"bench_distributed: the ranks' sums of {tuple(found.shape)} differ")


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=writable, help="write the rows to this file as they come")
    for name, default in (("batches", BATCHES), ("lengths", LENGTHS), ("contexts", CONTEXTS)):
        shown = ",".join(map(str, default))
        parser.add_argument(f"--{name}", type=sizes, default=default, help=f"{shown} if not given; '' leaves them out")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        raise SystemExit("bench_distributed: start it with torchrun --nproc-per-node 2 benchmarks/bench_distributed.py")
    device = initialise()
    world = dist.get_world_size()
    if device.type != "cuda":
        raise SystemExit("bench_distributed: needs one GPU per rank; the demo command runs on CPUs")
    ways = [
        Parallel.create(tp_size=tp, cp_size=world // tp, device_type="cuda")
        for tp in range(world, 0, -1)
        if world % tp == 0
    ]
    cp = ways[-1]
    about = environment.describe(device) | {
        "ranks": world,
        "command": f"torchrun --nproc-per-node {world} benchmarks/bench_distributed.py --csv FILE",
    }
    first = dist.get_rank() == 0
    shown = ("split", "one_us", "many_us", "share", "nccl_us", "error", "what") if first else ()
    table = Table(arguments.csv if first else None, about, shown=shown)
    with torch.inference_mode():
        rows = chain(
            collective_rows(cp, device),
            context_rows(cp, arguments.contexts, device),
            layer_rows(ways, arguments.batches, arguments.lengths, device),
        )
        for row in rows:
            share = {"share": row["many_us"] / row["one_us"]} if "one_us" in row else {}
            table.add(row | share)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
