"""Decode with a small DeepSeek-style model, compiled with fullgraph=True, on the GPU if torch finds one.

A decoder with DeepSeek R1's attention heads (128 heads of 128 + 64, latent 512, rope 64), a narrow hidden size, few
layers and random weights prefills ragged prompts, then decodes greedily through torch.compile over a paged latent
cache. Afterwards every step's logits are compared with an eager fp32 forward of the same weights that uses no cache, no
absorption and no operator of this package. The demo fails if they differ by more than the format's rounding.
On a CPU the operators run their fp32 reference, so this shows the model, the cache and the compiler, and no kernel.

  python -m mla_suite demo                                64 tokens per prompt, on the GPU if there is one
  python -m mla_suite demo --device cpu                   on the CPU
  python -m mla_suite demo --kv-format fp16               another cache format
  python -m mla_suite demo --json                         the numbers, for a program
  torchrun --nproc-per-node 2 -m mla_suite demo --tp 2    one layer spread over two ranks (or --cp 2): NCCL or gloo
  python -m mla_suite demo --emulate gfx942               whole attention layers on an emulated AMD GPU, or gfx950

With --emulate, single layers at their published sizes run one decode step twice: on the reference, and with `plan`,
`append_kv`, attention and `combine` as that GPU's machine code in the emulator. The demo prints which backend ran each
operator and why, the counts and the bound of every launch, what the sanitizer found, and the largest differences. It
fails if an operator that has kernels for the GPU ran otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from mla_suite.cli import bar, positive
from mla_suite.errors import UsageError

if TYPE_CHECKING:
    import torch

PROMPTS = (37, 5, 64, 18)  # tokens per prompt: ragged, below, at and above a page
PAGE_SIZE = 16
VOCABULARY = 1024
# The share of the largest logit that steps may differ by, ten times the usual. Activations of other formats are bf16.
MAX_DIFFERENCE = {"fp16": 0.005, "fp32": 1e-4}
MAX_BF16_DIFFERENCE = 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=positive, default=64, help="tokens to decode per sequence (default 64)")
    parser.add_argument("--layers", type=positive, default=2, help="decoder layers (default 2)")
    parser.add_argument("--kv-format", default="bf16", help="KV cache format: bf16, fp16 or fp32 (default bf16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and prompts (default 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to run (default: a GPU if torch finds one)")
    parser.add_argument("--emulate", metavar="ARCH", help="run whole layers on an emulated gfx942 or gfx950 instead")
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks, under torchrun (default 1)")
    parser.add_argument("--cp", type=positive, default=1, help="context-parallel ranks, under torchrun (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    if args.emulate:
        return _emulated(args.emulate, as_json=args.json)
    if args.tp * args.cp > 1:
        from mla_suite.cli import demo_distributed

        return demo_distributed.run(args.tp, args.cp, tokens=args.tokens, seed=args.seed, as_json=args.json)
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU; leave it out, or install the build of torch for yours")
    used = describe(torch.device(device))
    if not args.json:
        print(f"device: {used}", flush=True)
    with torch.device(device):
        report = {"device": used} | decode(args.tokens, args.layers, args.kv_format, args.seed, quiet=args.json)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["within_bound"] else 1


def _emulated(arch: str, *, as_json: bool) -> int:
    from rich.console import Console

    from mla_suite.build import ObjectError
    from mla_suite.cli import demo_emulated
    from mla_suite.launch import DriverError, LaunchError

    try:
        report = demo_emulated.report(arch, quiet=as_json)
    except (ValueError, LaunchError, DriverError, ObjectError) as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        demo_emulated.show(report, Console())
    return 1 if report["problems"] else 0


def decode(tokens: int, layers: int, kv_format: str, seed: int, *, quiet: bool) -> dict[str, Any]:
    """Prefill, decode compiled, compare; -> the report that is printed."""
    import torch

    import mla_suite
    from mla_suite.launch import current_arch
    from mla_suite.models import MLAConfig, PagedLatentCache
    from mla_suite.models.config import LATENT, ROPE
    from mla_suite.models.decoder import Decoder

    torch.manual_seed(seed)
    r1 = MLAConfig.deepseek_r1()
    config = MLAConfig(
        hidden_size=512,
        num_heads=r1.num_heads,
        q_lora_rank=256,
        num_layers=layers,
        yarn=r1.yarn,
        max_position=max(PROMPTS) + tokens,
    )
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(kv_format, torch.bfloat16)
    model = Decoder(config, VOCABULARY, kv_format=kv_format, dtype=dtype).eval()
    pages = sum(-(-(n + tokens) // PAGE_SIZE) for n in PROMPTS)
    cache = PagedLatentCache(layers, pages, PAGE_SIZE, kv_format=kv_format, device=torch.get_default_device())
    sequences = [cache.allocate(n + tokens) for n in PROMPTS]
    prompts = [torch.randint(VOCABULARY, (n,)) for n in PROMPTS]
    width = max(-(-(n + tokens) // PAGE_SIZE) for n in PROMPTS)

    step_function = torch.compile(model.decode, fullgraph=True)
    logits_by_step = []
    with torch.no_grad(), bar("prefill", tokens, quiet=quiet) as update:
        step = cache.append(sequences, list(PROMPTS), width=width)
        logits = model.prefill(torch.cat(prompts), list(PROMPTS), cache, step)
        chosen = [logits.argmax(-1)]
        started = time.perf_counter()
        compile_seconds = 0.0
        update(description="compile")
        for index in range(tokens):
            step = cache.append(sequences, [1] * len(sequences), width=width)
            logits = step_function(chosen[-1][:, None], cache.layers, step)[:, 0]
            if index == 0:
                compile_seconds = time.perf_counter() - started
                started = time.perf_counter()
                update(description="decode")
            logits_by_step.append(logits)
            chosen.append(logits.argmax(-1))
            update(advance=1)
        decode_seconds = time.perf_counter() - started

        update(description="compare")
        model.float()
        difference = largest = 0.0
        for b, prompt in enumerate(prompts):
            whole = torch.cat([prompt, torch.stack([c[b] for c in chosen[:-1]])])
            exact = model.unabsorbed(whole[None])[0, len(prompt) :]
            mine = torch.stack([logits[b] for logits in logits_by_step])
            difference = max(difference, (mine - exact).abs().max().item())
            largest = max(largest, exact.abs().max().item())

    q = torch.zeros(len(PROMPTS), 1, config.num_heads, LATENT + ROPE, dtype=dtype)
    kv_c = torch.zeros(len(PROMPTS), LATENT, dtype=dtype)
    k_pe = torch.zeros(len(PROMPTS), ROPE, dtype=dtype)
    table, lengths, layer = step.block_table, step.seq_lens, cache.layers[0]
    explained = {
        "decode": mla_suite.explain("decode", q, layer, lengths, table, softmax_scale=1.0, kv_format=kv_format),
        "append_kv": mla_suite.explain("append_kv", kv_c, k_pe, layer, step.slot_mapping, kv_format=kv_format),
    }
    emulated = None if layer.is_cuda else current_arch(layer)
    full = 2 * config.num_heads * (config.qk_head_dim + config.v_head_dim)
    bound = MAX_DIFFERENCE.get(kv_format, MAX_BF16_DIFFERENCE) * largest
    return {
        "model": f"{layers} layers, {config.num_heads} heads of {r1.qk_nope_head_dim} + {ROPE}, {kv_format}",
        "prompts": list(PROMPTS),
        "tokens_decoded": tokens * len(PROMPTS),
        "compile_seconds": round(compile_seconds, 2),
        "emulated": emulated.name if emulated else None,
        "tokens_per_second": round((tokens - 1) * len(PROMPTS) / decode_seconds, 1),
        "cache_bytes_per_token_and_layer": cache.bytes_per_token // layers,
        "full_attention_bytes_per_token_and_layer": full,
        "largest_logit_difference": difference,
        "largest_logit": largest,
        "largest_difference_allowed": bound,
        "within_bound": difference <= bound,
        "backends": {name: str(answer) for name, answer in explained.items()},
    }


def describe(used: torch.device) -> str:
    """Names the device that the demo uses, and what else it could use on this machine."""
    import torch

    others, gpus = ["--emulate gfx942 or gfx950"], torch.cuda.device_count()
    if gpus > 1:
        others.insert(0, f"{gpus} GPUs under torchrun with --tp or --cp")
    if used.type == "cuda":
        others.insert(0, "--device cpu")
        return f"{torch.cuda.get_device_name(used)}; it could use {', '.join(others)}"
    if gpus:
        others.insert(0, f"--device cuda, {torch.cuda.get_device_name()}")
    return f"CPU{'' if gpus else ', since torch finds no GPU'}; it could use {', '.join(others)}"


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, title="python -m mla_suite demo")
    table.add_row("model", report["model"])
    table.add_row("decoded", f"{report['tokens_decoded']} tokens after ragged prompts of {report['prompts']}")
    speed = f"{report['tokens_per_second']} tokens/s (first step, compilation: {report['compile_seconds']} s)"
    if report["emulated"]:
        speed += f" of this CPU, which emulates {report['emulated']}: it says nothing about that GPU"
    table.add_row("speed", speed)
    latent, full = report["cache_bytes_per_token_and_layer"], report["full_attention_bytes_per_token_and_layer"]
    table.add_row(
        "cache", f"{latent} bytes per token and layer; full multi-head attention: {full} ({full / latent:.0f}x)"
    )
    table.add_row(
        "largest difference",
        f"{report['largest_logit_difference']:.2e} from the eager fp32 reference; "
        f"logits reach {report['largest_logit']:.2f}",
    )
    verdict = "passed" if report["within_bound"] else "FAILED"
    table.add_row("result", f"{verdict}: {report['largest_difference_allowed']:.2e} is allowed")
    for name, answer in report["backends"].items():
        table.add_row(name, answer)
    console.print(table)
