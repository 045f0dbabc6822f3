"""A decode step of a whole Hugging Face DeepSeek V3 model, patched and not, eager and compiled, beside its floor.

    python benchmarks/bench_transformers.py [--csv FILE]

The model has DeepSeek V3's attention, dense MLPs of its size and random bf16 weights; `--layers` of them. Prompts are
prefilled for real. Each line is one model state (`patch` or none) and mode: `compiled` is
`torch.compile(model, mode="reduce-overhead", fullgraph=True)`. Unpatched, transformers' StaticCache holds the latents,
which every step expands to keys and values of all heads; patched, `LatentCache` holds them and decode reads them.

Columns:
ms          per step: the median of three rounds of queued steps, one token per sequence each
floor_ms    time to read weights and cached latents once, at the reading speed measured in the same run
over_floor  ms / floor_ms
gib         the most memory that the steps took, weights included
error       |logits of the first step - the unpatched eager model's| / |those|

The embedding counts as read, though a step reads a row of it per sequence (2 % of the bytes). To see that everything
runs where there is no GPU: `--layers 1 --hidden 128 --heads 4 --intermediate 256 --batch 2 --context 32`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from definition import relative
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache

from mla_suite.bench import floors
from mla_suite.bench.environment import versions
from mla_suite.bench.saving import Table
from mla_suite.cli import writable
from mla_suite.integrations.transformers import LatentCache, patch, unpatch

LATENT_BYTES = 576 * 2
WARM, ROUNDS, STEPS = 5, 3, 20
PIECE = 256  # tokens that are prefilled at once; the unpatched model may hold scores of all of them
GROWTH = WARM + ROUNDS * (STEPS + 1)  # tokens that a measurement adds to every sequence
CLOSE = 3e-2  # of logits after all layers; absorbed weights round to bf16 at other places


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: 4)")
    parser.add_argument("--hidden", type=int, default=7168, help="hidden size (default: 7168)")
    parser.add_argument("--heads", type=int, default=128, help="attention heads (default: 128)")
    parser.add_argument("--intermediate", type=int, default=18432, help="size of the MLPs (default: 18432)")
    parser.add_argument("--batch", type=int, default=32, help="sequences (default: 32)")
    parser.add_argument("--context", type=int, default=4096, help="cached tokens of each (default: 4096)")
    parser.add_argument("--modes", default="eager,compiled", help="eager comes first, for it is compared with")
    parser.add_argument("--csv", type=writable, help="write the lines to this file as they come")
    return parser.parse_args()


def make_model(options: argparse.Namespace, device: torch.device) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=8192,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        first_k_dense_replace=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        q_lora_rank=min(1536, options.hidden),
        max_position_embeddings=options.context + 1024,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with device:
        return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


def floor_ms(model: torch.nn.Module, options: argparse.Namespace, device: torch.device) -> float:
    if device.type != "cuda":
        return float("nan")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    latents = options.layers * options.batch * options.context * LATENT_BYTES
    return floors.measure(device).memory_us(weights + latents) / 1e3


def step_ms(step: Callable[[], object], device: torch.device) -> float:
    """The median round, of steps that are queued one behind the other, so that the slower of host and device counts."""
    rounds = []
    for _ in range(ROUNDS):
        step()
        synchronise(device)
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronise(device)
        rounds.append((time.perf_counter() - begin) / STEPS * 1e3)
    return median(rounds)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows; what cannot be measured on this device is NaN."""
    model = make_model(options, device)
    floor = floor_ms(model, options, device)
    prompt = torch.randint(model.config.vocab_size, (options.batch, options.context), device=device)
    token = prompt[:, :1].clone()
    torch._dynamo.mark_static_address(token)
    longest, expected = options.context + GROWTH, None
    for state in ("unpatched", "patched"):
        if state == "patched":
            patch(model)
        for mode in options.modes.split(","):
            torch._dynamo.reset()
            if state == "patched":
                cache: Any = LatentCache(model, options.batch, longest)
            else:
                cache = StaticCache(config=model.config, max_cache_len=longest)
            for piece in prompt.split(PIECE, dim=1):
                model(input_ids=piece, past_key_values=cache, logits_to_keep=1)
            call: Any = model
            if mode == "compiled":
                call = torch.compile(model, mode="reduce-overhead", fullgraph=True)

            def step(call: Any = call, cache: Any = cache) -> torch.Tensor:
                return call(input_ids=token, past_key_values=cache).logits

            logits = step().float()
            expected = logits if expected is None else expected
            error = relative(logits, expected)
            if not error <= CLOSE:  # NaN compares false
                raise AssertionError(f"{state}, {mode}: logits are off by {error:.1e}; {CLOSE:.0e} is allowed")
            for _ in range(WARM - 1):  # a compiled step is recorded before it is replayed
                step()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            ms = step_ms(step, device)
            row = {"model": state, "mode": mode, "ms": ms, "floor_ms": floor, "over_floor": ms / floor}
            yield row | {"gib": peak_gib(device), "error": error}
    unpatch(model)


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = versions("transformers", "torch")
    print(found, flush=True)
    table = Table(options.csv, shown=("model", "mode", "ms", "floor_ms", "over_floor", "gib", "error"))
    sizes = ("layers", "hidden", "heads", "intermediate", "batch", "context")
    facts = {size: getattr(options, size) for size in sizes} | {"versions": found}
    with torch.no_grad():
        for row in measure(options, device):
            table.add(row | facts)


if __name__ == "__main__":
    main()
