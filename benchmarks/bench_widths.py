"""Planned decode of narrow latents beside the same model's latents padded to 512 + 64, in pairs of rounds.

    python benchmarks/bench_widths.py [--cache e4m3] [--batch 128] [--heads 32] [--kv 4096] [--rounds 8]

Prints a line for each width and type of cache: microseconds, the padded time, and the median ratio of paired rounds.
tests/gpu/test_decode_on_gpu.py says whether results are right.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch

import mla_suite
from mla_suite.bench.timer import REST_S, Replay, cold_turns
from mla_suite.ops.decode.samples import decode_sample

WIDTHS = ((512, 64), (512, 0), (256, 64), (256, 32), (128, 32))
CACHES: dict[str, dict[str, Any]] = {"bf16": {}, "e4m3": {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}}


def replay(arguments: argparse.Namespace, latent: int, rope: int, types: dict[str, Any]) -> Replay:
    """A graph of calls with a plan over as many caches as no cache memory holds."""
    device = torch.device("cuda")
    sample = decode_sample((arguments.kv,) * arguments.batch, heads=arguments.heads, latent=latent, rope=rope, **types)
    args, kwargs = sample.make(device)
    plan = mla_suite.plan(args[2], num_heads=arguments.heads, max_seqlen_kv=arguments.kv)
    given = dict(kwargs, plan=plan, max_seqlen_kv=arguments.kv)
    given = {name: value for name, value in given.items() if name not in ("num_splits", "split_size")}
    given["kv_descale"] = args[8]
    turns = [args[1], *(args[1].clone() for _ in range(cold_turns(args[1].nbytes, device)))]
    print(mla_suite.explain("decode", args[0], args[1], *args[2:4], **given), flush=True)
    return Replay(lambda cache: mla_suite.decode(args[0], cache, *args[2:4], **given), turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 128), ("heads", 32), ("kv", 4096), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--cache", choices=CACHES, action="append", help="only this type; repeatable")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_widths: needs a GPU; `python -m mla_suite emulate --help` counts on AMD without one")
    for name in arguments.cache or CACHES:
        types = CACHES[name]
        padded = replay(arguments, *WIDTHS[0], types)
        for latent, rope in WIDTHS:
            own = replay(arguments, latent, rope, types)
            pairs = [(own.round(REST_S), padded.round(REST_S)) for _ in range(arguments.rounds)]
            times = [median(times) for times in zip(*pairs, strict=True)]
            ratio = median(first / second for first, second in pairs)
            print(
                f"{name} {latent} + {rope}: {times[0]:.1f} us, padded {times[1]:.1f} us, ratio {ratio:.3f}", flush=True
            )
            del own
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
