"""What bench_sglang.py adds to SGLang's scheduler process: random weights, a check of results, and times of steps.

`install` is an entry point of the group sglang.srt.plugins, of a distribution that bench_sglang.py makes. A file of it
says where rows go and which steps are asked for.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import nullcontext
from importlib.metadata import distribution, entry_points
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from definition import attended, relative
from profiles import busy_us, device_kernels

from mla_suite.bench.timer import queued_us
from mla_suite.integrations import FP8, plugins
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

NAME, ASKED = "mla_suite_bench", "asked.json"  # the distribution, and its file
GROUP = "sglang.srt.plugins"
RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
ATTENTION = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward"  # in graphs of prompts, too
COMPARED_STEPS = 8  # of a process, not replayed but eager, so that each layer's arguments can be read
WARM_PROMPTS, TIMED_PROMPTS, PROFILED_PROMPTS = 1, 3, 3  # of one length behind one prefix, in this order
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 8, 40, 5
STEPS = WARM_STEPS + TIMED_STEPS + PROFILED_STEPS + 1  # of a batch, after which its row is written
ROUNDS, REPLAYS = 3, 8
CUDA = torch.profiler.ProfilerActivity.CUDA
RECORDS = get_kv_format("v32")  # of a model with an indexer, in an fp8 cache


def install() -> None:
    """Hooks of a process of SGLang; only the scheduler's calls them."""
    from sglang.srt.model_loader import loader
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if all(point.value != "mla_suite.integrations.plugins:sglang" for point in entry_points(group=GROUP)):
        plugins.sglang()  # where mla_suite is on the path without being installed
    loader.initialize_dummy_weights = use_random_weights
    steps = Steps(**json.loads(distribution(NAME).read_text(ASKED) or ""))
    HookRegistry.register(f"{RUNNER}.can_run_graph", steps.can_run_graph, HookType.AROUND)
    HookRegistry.register(f"{RUNNER}.execute", steps.execute, HookType.AROUND)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", steps.forward, HookType.AROUND)
    HookRegistry.register(ATTENTION, steps.attend, HookType.AROUND)


def use_random_weights(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Normal weights, and norms of 1, so that logits and softmax are like a real model's."""
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(std=0.02, generator=torch.Generator(weight.device).manual_seed(weight.numel()))


def exact(
    layer: Any, q: torch.Tensor, batch: Any, b: int, length: int, selected: torch.Tensor | None, fp8_queries: bool
) -> torch.Tensor:
    """What the definition makes, in fp32, of a query q [heads, 576] of sequence b and its keys in SGLang's pool.

    length       of the sequence up to this query
    selected     int32 [batch, topk]: slots of the keys, -1 for none; without it all keys of the sequence count
    fp8_queries  over an fp8 cache of rows the backend quantises queries, by a scale of 1
    """
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool

    slots = get_req_to_token_pool().req_to_token[batch.req_pool_indices[b], :length].long()
    if selected is not None:
        chosen = selected[b][selected[b] >= 0].long()
        if len(chosen.unique()) != min(length, selected.shape[1]) or not torch.isin(chosen, slots).all():
            raise AssertionError(
                f"{len(chosen)} slots are selected for a sequence of {length} keys, not all of its own"
            )
        slots = chosen
    rows = get_token_to_kv_pool().get_key_buffer(layer.layer_id).flatten(1)
    if rows.shape[1] != q.shape[-1]:
        keys = caches.gather(RECORDS, rows.view(torch.uint8)[:, None], slots)
    else:
        keys = rows[slots].float()
        if rows.dtype in FP8 and fp8_queries:
            q = q.to(rows.dtype).float()
    return attended(q[None], keys, layer.scaling)[0]


def say(path: str, kind: str, value: dict[str, Any]) -> None:
    """Append a line of JSON to the file that an engine's processes share."""
    with open(path, "a") as written:
        written.write(json.dumps([kind, value]) + "\n")


class Steps:
    """The state between the calls of one scheduler.

    path     rows are appended to this file, a line of JSON each
    layers   of the model
    batches  sizes that are timed
    compare  whether the first steps are eager and compared with the definition, and the first prompts of each length
    fp8_queries  as in `exact`
    """

    def __init__(self, path: str, layers: int, batches: list[int], compare: bool, fp8_queries: bool) -> None:
        self.path, self.layers, self.batches, self.fp8_queries = path, layers, batches, fp8_queries
        self.compare = compare
        self.eager = COMPARED_STEPS if compare else 0
        self.comparing = False
        self.errors: list[float] = []
        self.batch = self.done = 0
        self.ends: list[float] = []
        self.profile: Any = None
        self.row: dict[str, Any] = {}
        self.prompts: Counter[tuple[tuple[int, int], ...]] = Counter()  # by their new and cached tokens
        self.prompt: dict[str, Any] = {}  # the one under way

    def can_run_graph(self, original: Any, runner: Any, batch: Any) -> bool:
        """SGLang's answer, and no while steps are compared."""
        answer = bool(original(runner, batch))
        self.comparing = answer and batch.forward_mode.is_decode() and self.eager > 0
        if not self.comparing:
            return answer
        self.eager -= 1
        return False

    def attend(
        self,
        original: Any,
        backend: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **given: Any,
    ) -> Any:
        """One layer's attention, compared with the definition in the first and the last layer: of the queries of an
        eager step, and of each sequence's first and last query in an absorbed prompt without a selection."""
        out, batch = original(backend, q, k, v, layer, forward_batch, *args, **given), forward_batch
        ends, mode, selected = (0, self.layers - 1), batch.forward_mode, given.get("topk_indices")
        if self.prompt and layer.layer_id == 0:
            self.prompt["absorbed"] = layer.tp_k_head_num == 1
        if layer.layer_id not in ends:
            return out
        queries: list[tuple[int, int, int]]  # a row of q, its sequence, and the sequence's length up to it
        if self.comparing and mode.is_decode():
            queries = [(b, b, length) for b, length in enumerate(batch.seq_lens.tolist())]
        elif self.prompt.get("compare") and layer.tp_k_head_num == 1 and selected is None:
            queries, at = [], 0
            for b, (new, cached) in enumerate(
                zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)
            ):
                queries += [(at, b, cached + 1), (at + new - 1, b, cached + new)]
                at += new
        else:
            return out
        heads = layer.tp_q_head_num
        parts = [part.reshape(len(q), heads, -1) for part in (q, given.get("q_rope")) if part is not None]
        for row, b, length in queries:
            query = torch.cat([part[row] for part in parts], dim=-1)
            expected = exact(layer, query, batch, b, length, selected, self.fp8_queries)
            self.errors.append(relative(out.view(len(q), heads, -1)[row], expected))
        if mode.is_decode() and layer.layer_id == ends[1] and not self.eager:
            say(self.path, "compared", {"compared": len(self.errors), "error": max(self.errors)})
        return out

    def forward(self, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A pass of the model. One of a prompt alone is counted by its new and cached tokens and written down."""
        if not (batch.rids and batch.forward_mode.name in ("EXTEND", "MIXED")):
            return original(runner, batch, *args, **kwargs)
        shape = tuple(zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True))
        seen = self.prompts[shape]
        self.prompts[shape] += 1
        self.prompt, before = {"compare": self.compare and not seen}, len(self.errors)
        profiled = len(shape) == 1 and seen >= WARM_PROMPTS + TIMED_PROMPTS
        with torch.profiler.profile(activities=[CUDA]) if profiled else nullcontext() as profile:
            out = original(runner, batch, *args, **kwargs)
            if profiled:
                torch.cuda.synchronize()
        if len(shape) == 1:
            (new, cached), errors = shape[0], self.errors[before:]
            row = {"new": new, "cached": cached, "graph": bool(out.can_run_graph), **self.prompt}
            row |= {"compared": len(errors), "error": max(errors, default=0.0)}
            row["busy_us"] = busy_us(device_kernels(profile.events())) if profile else 0.0
            say(self.path, "pass", row)
        self.prompt = {}
        return out

    def execute(self, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A captured step. Of a batch that is asked for, some are timed, some profiled, and the last is replayed."""
        if batch.batch_size != self.batch:
            self.batch, self.done, self.ends = batch.batch_size, 0, []
        if self.batch not in self.batches or self.done > STEPS:
            return original(runner, batch, *args, **kwargs)
        if self.done == WARM_STEPS + TIMED_STEPS:
            self.row = {"batch": self.batch, "context": int(batch.seq_lens.max()) - 1 - self.done, **self.period()}
            self.profile = torch.profiler.profile(activities=[CUDA])
            torch.cuda.synchronize()
            self.profile.start()
        if self.done == STEPS - 1:
            torch.cuda.synchronize()
            self.profile.stop()
            self.row["busy_us"] = busy_us(device_kernels(self.profile.events())) / PROFILED_STEPS
            self.profile = None
        self.ends.append(time.perf_counter())
        out = original(runner, batch, *args, **kwargs)
        self.done += 1
        if self.done == STEPS:
            graph = runner.backend._graphs[runner._replay_graph_key]
            torch.cuda.synchronize()
            replays = [queued_us(graph.replay, REPLAYS) for _ in range(ROUNDS)]
            say(self.path, "row", self.row | {"step_us": median(replays)})
        return out

    def period(self) -> dict[str, float]:
        """Between two steps of the scheduler, whose work for the next one overlaps the device's."""
        between = [after - before for before, after in pairwise(self.ends[WARM_STEPS:])]
        return {"period_us": 1e6 * median(between), "tokens_per_s": self.batch / median(between)}
