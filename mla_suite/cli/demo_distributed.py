"""`demo --tp N --cp M` under torchrun: one layer spread over the ranks decodes and is compared with the whole layer."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from mla_suite.cli.demo import PAGE_SIZE, PROMPTS

TIMEOUT_S = 60.0  # of every collective
COLLECTIVE_ERRORS = ("gloo", "Connection closed", "device-side assert")  # words of a collective that broke off
MAX_DIFFERENCE = {"cpu": 1e-5, "cuda": 2e-2}  # relative: fp32 on a CPU, bf16 on GPUs


def run(tp_size: int, cp_size: int, *, tokens: int, seed: int, as_json: bool) -> int:
    """Returns the exit status; a rank that fails says why in one sentence and ends all ranks with status 1."""
    import torch.distributed as dist

    from mla_suite.distributed.parallel import initialise

    try:
        device = initialise(TIMEOUT_S)
        if dist.get_rank() == 0 and not as_json:
            print(f"device: {_described(device)}", flush=True)
        report = decode(tp_size, cp_size, device, tokens=tokens, seed=seed)
    except (ValueError, RuntimeError) as error:
        sentence = str(error).strip().split("\n")[0]
        if isinstance(error, dist.DistError) or any(word in sentence for word in COLLECTIVE_ERRORS):
            sentence = (
                f"another rank ended or did not answer within {TIMEOUT_S:.0f} s; its own sentence says why ({sentence})"
            )
        who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        sys.stderr.write(f"demo: {who}{sentence}\n")  # one write: the ranks share the stream
        return 1
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        print(
            json.dumps(report, indent=2) if as_json else "\n".join(f"{key:28}{value}" for key, value in report.items())
        )
    return 0 if report["largest relative difference"] <= MAX_DIFFERENCE[device.type] else 1


def _described(device: Any) -> str:
    """Names the device of the ranks, and says what else they could use."""
    import torch
    import torch.distributed as dist

    ranks = f"{dist.get_world_size()} ranks over {dist.get_backend()}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {ranks}"
    found = torch.cuda.device_count()
    return f"CPU, {ranks}; they would use a GPU each if this host had as many, and torch finds {found}"


def decode(tp_size: int, cp_size: int, device: Any, *, tokens: int, seed: int) -> dict[str, Any]:
    """Prefill and compiled decode steps of one layer on all ranks; -> the report."""
    import torch
    import torch.distributed as dist

    from mla_suite.distributed import ContextParallelCache, Parallel, ParallelMLA, check_agreement
    from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

    parallel = Parallel.create(tp_size=tp_size, cp_size=cp_size, device_type=device.type, timeout_s=TIMEOUT_S)
    check_agreement({"tokens": tokens, "seed": seed, "torch": torch.__version__})
    on_gpu = device.type == "cuda"
    dtype, kv_format = (torch.bfloat16, "bf16") if on_gpu else (torch.float32, "fp32")
    hidden_size, q_lora_rank = (7168, 1536) if on_gpu else (512, 256)
    length = max(PROMPTS) + tokens
    config = MLAConfig(hidden_size=hidden_size, num_heads=128, q_lora_rank=q_lora_rank, max_position=length)
    table = cos_sin_table(config, device=device)
    pages = len(PROMPTS) * -(-length // PAGE_SIZE)
    whole = MLA(config, kv_format=kv_format, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)  # the same weights and inputs on every rank
    with torch.no_grad():
        for parameter in whole.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.ones_like(drawn) if parameter.dim() == 1 else drawn)
        layer = ParallelMLA(config, parallel, kv_format=kv_format, dtype=dtype, device=device)
        layer.load_full_weights(whole.state_dict())
        own_cache = ContextParallelCache(1, pages, PAGE_SIZE, shard=layer.shard, kv_format=kv_format, device=device)
        whole_cache = PagedLatentCache(1, pages, PAGE_SIZE, kv_format=kv_format, device=device)
        own = [own_cache.allocate(n + tokens) for n in PROMPTS]
        all_of_it = [whole_cache.allocate(n + tokens) for n in PROMPTS]
        x = torch.randn(sum(PROMPTS), hidden_size, generator=generator).to(device, dtype)
        counts = list(PROMPTS)
        layer.prefill(x, table, own_cache.layers[0], own_cache.append(own, counts), q_lens=counts)
        whole.prefill(x, table, whole_cache.layers[0], whole_cache.append(all_of_it, counts), q_lens=counts)
        step_function = torch.compile(layer.decode, fullgraph=True)
        width = -(-length // PAGE_SIZE)
        worst, spent = 0.0, []
        for _ in range(tokens):
            x = torch.randn(len(PROMPTS), 1, hidden_size, generator=generator).to(device, dtype)
            step = own_cache.append(own, [1] * len(own), width=width)
            began = time.perf_counter()
            mine = step_function(x, own_cache.layers[0], step, table)
            if on_gpu:
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - began)
            step = whole_cache.append(all_of_it, [1] * len(own), width=width)
            exact = whole.decode(x, whole_cache.layers[0], step, table).float()
            worst = max(worst, ((mine.float() - exact).abs().max() / exact.abs().max()).item())
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, worst)
    return {
        "ranks": f"{tp_size} tensor parallel x {cp_size} context parallel, {dist.get_backend()} on {device.type}",
        "layer": f"{config.num_heads} heads, hidden size {hidden_size}, {kv_format}",
        "decoded": f"{tokens} tokens after prompts of {list(PROMPTS)}",
        "ms per step (median)": round(sorted(spent)[len(spent) // 2] * 1e3, 2),
        "largest relative difference": max(differences),
    }
