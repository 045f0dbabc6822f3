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
  torchrun --nproc-per-node 2 -m mla_suite demo --tp 2    attention spread over two ranks (or --cp 2): NCCL or gloo
  python -m mla_suite demo --emulate gfx942               whole attention layers on an emulated AMD GPU, or gfx950

With --emulate, single layers at their published sizes run one decode step twice: on the reference, and with `plan`,
`append_kv`, attention and `combine` as that GPU's machine code in the emulator. The demo prints which backend ran each
operator and why, the counts and the bound of every launch, what the sanitizer found, and the largest differences. It
fails if an operator that has kernels for the GPU ran otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mla_suite.build import ObjectError
from mla_suite.cli import demo_emulated, demo_model, positive
from mla_suite.errors import UsageError
from mla_suite.launch import DriverError, LaunchError

DECODER = {"tokens": 64, "layers": 2, "kv_format": "bf16", "seed": 0, "device": None, "tp": 1, "cp": 1}
"""Options of the decoder, which --emulate does not run, and their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(**DECODER)
    parser.add_argument("--tokens", type=positive, help="tokens to decode per sequence (default 64)")
    parser.add_argument("--layers", type=positive, help="decoder layers (default 2)")
    formats = "KV cache format: bf16 (default), fp16, fp32 or fp8; on a CPU also fp8_fnuz, v32 and v32_pow2"
    parser.add_argument("--kv-format", help=formats)
    parser.add_argument("--seed", type=int, help="seed of weights and prompts (default 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to run (default: a GPU if torch finds one)")
    parser.add_argument("--emulate", metavar="ARCH", help="run whole layers on an emulated gfx942 or gfx950 instead")
    parser.add_argument("--tp", type=positive, help="tensor-parallel ranks, under torchrun (default 1)")
    parser.add_argument("--cp", type=positive, help="context-parallel ranks, under torchrun (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    report = _report(args)
    if report is None:
        return 1
    if int(os.environ.get("RANK", "0")) == 0:
        if args.json:
            print(json.dumps(report, indent=2))
        else:
            (demo_emulated.show if args.emulate else _show)(report, Console())
    return 1 if report["problems"] else 0


def _report(args: argparse.Namespace) -> dict[str, Any] | None:
    """The report of a run, whose `problems` has a sentence for each fault. None where it failed, and said why."""
    if args.emulate:
        given = [f"--{name.replace('_', '-')}" for name, default in DECODER.items() if getattr(args, name) != default]
        if given:
            raise UsageError(f"--emulate runs single layers of its own, and no decoder: leave {', '.join(given)} out")
        try:
            return demo_emulated.report(args.emulate, quiet=args.json)
        except ValueError as error:
            raise UsageError(str(error).removeprefix("emulate: ")) from error
        except (LaunchError, DriverError, ObjectError) as error:
            print(error, file=sys.stderr)
            return None
    what = args.tokens, args.layers, args.kv_format, args.seed
    report: dict[str, Any] | None
    if args.tp * args.cp > 1:
        from mla_suite.cli import demo_ranks  # torch.distributed takes long to import, and not every torch has it

        report = demo_ranks.decode(args.tp, args.cp, *what, quiet=args.json)
    else:
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU; leave it out, or install the build of torch for yours")
        used = describe(torch.device(device))
        if not args.json:
            print(f"device: {used}", flush=True)
        with torch.device(device):
            report = {"device": used} | demo_model.decode(*what, quiet=args.json)
    if report is not None:
        found, allowed = report["largest_logit_difference"], report["largest_difference_allowed"]
        report["problems"] = [] if found <= allowed else [f"logits differ by {found:.2e}; {allowed:.2e} is allowed"]
    return report


def describe(used: torch.device) -> str:
    """Names the device that the demo uses, and what else it could use on this machine."""
    others, gpus = ["--emulate gfx942 or gfx950"], torch.cuda.device_count()
    if gpus > 1:
        others.insert(0, f"{gpus} GPUs under torchrun with --tp or --cp")
    if used.type == "cuda":
        others.insert(0, "--device cpu")
        return f"{torch.cuda.get_device_name(used)}; it could use {', '.join(others)}"
    if gpus:
        others.insert(0, f"--device cuda, {torch.cuda.get_device_name()}")
    return f"CPU{'' if gpus else ', since torch finds no GPU'}; it could use {', '.join(others)}"


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, title="python -m mla_suite demo")
    table.add_row("model", report["model"])
    if "ranks" in report:
        table.add_row("ranks", report["ranks"])
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
    verdict = "FAILED" if report["problems"] else "passed"
    table.add_row("result", f"{verdict}: {report['largest_difference_allowed']:.2e} is allowed")
    for name, answer in report["backends"].items():
        table.add_row(name, answer)
    console.print(table)
