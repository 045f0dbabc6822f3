"""A decode step of the whole MLA layer at the sizes of GPU MODE's `amd-mla-decode`: batch 128, bf16, one new token.

    python benchmarks/bench_layer.py [--kv 512,2048] [--modes reduce-overhead,max-autotune-no-cudagraphs,eager]
    pytest benchmarks/bench_layer.py --benchmark-enable     host latency and device time; a tiny layer without a GPU

Down-projections as one product, absorption and values batched over the heads, cached keys rotated. One compilation
serves all lengths: `fullgraph`, the width of the block table dynamic. Device time is that of one replay of a CUDA graph
of the step, after a rest (burst) and at the end of 0.7 s without one (sustained); `reduce-overhead` captures its own.
A step reads 374 MB of weights, so nothing of it is cached from one to the next. The floor is the time to read the
weights, and attention's own floor, measured in the same run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from definition import relative
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile

import mla_suite
from mla_suite.bench import floors, sets, timer
from mla_suite.bench.floors import Floors
from mla_suite.bench.saving import Table
from mla_suite.models import MLA, MLAConfig, Step, cos_sin_table, slots

BATCH, PAGE = 128, 64
LENGTHS = (512, 2048, 4096, 6144)
MODES = ("eager", "default", "reduce-overhead", "max-autotune-no-cudagraphs")
FULL = MLAConfig(hidden_size=7168, num_heads=128, q_lora_rank=1536)
CLOSE = 1e-2  # |compiled - eager| / |eager|: bf16 roundings at other places
EFFORT = timer.Effort(rounds=3)
SHOWN = ("kv_len", "mode", "us", "sustained_us", "floor_us", "over_floor", "attention_us", "rest_us", "error")


class Inputs(NamedTuple):
    """Inputs of a step; seq_lens count the cached tokens, the new one comes on top."""

    x: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


class Layer(torch.nn.Module):
    """One step: where the new tokens go is found on the device, then the layer."""

    cos_sin: torch.Tensor

    def __init__(self, config: MLAConfig, longest: int, device: torch.device) -> None:
        super().__init__()
        self.attention = MLA(config, kv_format="bf16", dtype=torch.bfloat16, device=device).requires_grad_(False)
        for parameter in self.attention.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
        self.attention.fuse()
        self.register_buffer("cos_sin", cos_sin_table(config, longest, device), persistent=False)

    def forward(
        self, x: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        positions = seq_lens.long()[:, None]
        step = Step(block_table, seq_lens + 1, slots(block_table, positions, PAGE).flatten(), positions.flatten())
        return self.attention(x, kv_cache, step, self.cos_sin)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.attention.parameters())


def make_cache(batch: int, longest: int, device: torch.device) -> torch.Tensor:
    """Pages for `longest` tokens of every sequence."""
    return torch.randn(batch * -(-longest // PAGE), PAGE, 576, device=device).bfloat16()


def make_inputs(config: MLAConfig, batch: int, kv_len: int, kv_cache: torch.Tensor) -> Inputs:
    """Sequences of kv_len tokens, the new one included, in shuffled pages of the cache."""
    device, width = kv_cache.device, -(-kv_len // PAGE)
    generator = torch.Generator(device).manual_seed(kv_len)
    order = torch.randperm(kv_cache.shape[0], generator=generator, device=device)[: batch * width]
    x = torch.randn(batch, 1, config.hidden_size, generator=generator, device=device).bfloat16()
    lens = torch.full((batch,), kv_len - 1, dtype=torch.int32, device=device)
    return Inputs(x, kv_cache, order.int().view(batch, width), lens)


def in_mode(layer: Layer, mode: str) -> Callable[..., torch.Tensor]:
    if mode == "eager":
        return layer
    return torch.compile(layer, fullgraph=True, mode=None if mode == "default" else mode)


def await_compilers() -> None:
    """Until Inductor's processes are up, 20 s at most: a compilation that begins before stays with this one's
    threads."""
    stop = time.perf_counter() + 20
    while not AsyncCompile.use_process_pool() and time.perf_counter() < stop:
        time.sleep(0.1)


def marked(inputs: Inputs, mode: str) -> Inputs:
    """The block table's width is dynamic; Inductor's own graphs read and write everything where it is, as in a server
    whose buffers stay, and copy nothing into place first (4 us for three copies)."""
    torch._dynamo.mark_dynamic(inputs.block_table, 1)
    if mode == "reduce-overhead":
        for tensor in inputs:
            torch._dynamo.mark_static_address(tensor)
    return inputs


def device_times(call: Callable[..., torch.Tensor], inputs: Inputs, mode: str) -> tuple[list[float], float]:
    """Rounds of burst, and the sustained time, in microseconds per step."""
    if mode == "reduce-overhead":  # each call replays the graph that Inductor recorded; one cannot be put in another
        return _own_graph(lambda: call(*inputs))
    replay = timer.Replay(lambda turn: call(*turn), [inputs])
    return [replay.round() for _ in range(EFFORT.rounds)], replay.sustained()


def _own_graph(call: Callable[[], object]) -> tuple[list[float], float]:
    """Calls queued one behind the other, so that the device's time counts, unless the host is slower."""
    for _ in range(4):  # warm-up, recording, replays
        call()

    def queued(count: int) -> float:
        call()
        return timer.queued_us(call, count)

    rounds = []
    for _ in range(EFFORT.rounds):
        torch.cuda.synchronize()
        time.sleep(EFFORT.rest_s)
        rounds.append(queued(20))
    stop = time.perf_counter() + timer.SUSTAINED_S
    while time.perf_counter() < stop:
        us = queued(80)
    return rounds, us


def floor_us(layer: Layer, ceilings: Floors, kv_len: int) -> float:
    """Reading the weights once, then what attention cannot go below."""
    attention = sets.decode(BATCH, layer.attention.config.num_heads, kv_len).sample
    return ceilings.memory_us(layer.weight_bytes) + ceilings.of(attention.bytes, attention.flops)[0]


def attention_us(layer: Layer, inputs: Inputs) -> float:
    """The decode operator alone on these inputs."""
    heads = layer.attention.config.num_heads
    q = torch.randn(BATCH, 1, heads, 576, device=inputs.x.device).bfloat16()
    scale = layer.attention.config.softmax_scale
    lens = inputs.seq_lens + 1

    def call(turn: Inputs) -> object:
        return mla_suite.decode(q, turn.kv_cache, lens, turn.block_table, softmax_scale=scale)

    return timer.median(timer.device_rounds(call, [inputs], EFFORT))


def measure(lengths: list[int], modes: list[str], ceilings: Floors) -> Iterator[dict[str, Any]]:
    """The columns of SHOWN of every mode at every length; a mode is compiled once, and that is checked."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    layer = Layer(FULL, max(lengths), device)
    kv_cache = make_cache(BATCH, max(lengths), device)
    problems = {kv: make_inputs(FULL, BATCH, kv, kv_cache) for kv in lengths}
    alone = {kv: attention_us(layer, inputs) for kv, inputs in problems.items()}
    for mode in modes:
        torch._dynamo.reset()
        counters.clear()
        if mode.startswith("max-autotune"):
            await_compilers()
        begun = time.perf_counter()
        call = in_mode(layer, mode)
        for kv, inputs in problems.items():
            inputs = marked(inputs, mode)
            wanted = layer(*inputs).clone()
            error = relative(call(*inputs), wanted)
            if not error <= CLOSE:  # NaN compares false
                raise AssertionError(f"{mode} at kv {kv} is off by {error:.1e}; {CLOSE:.0e} is allowed")
            if inputs is problems[lengths[0]] and mode != "eager":
                print(f"{mode}: compiled in {time.perf_counter() - begun:.0f} s", flush=True)
            rounds, steady = device_times(call, inputs, mode)
            us, floor, attention = timer.median(rounds), floor_us(layer, ceilings, kv), alone[kv]
            found = kv, mode, us, steady, floor, us / floor, attention, us - attention, error
            yield dict(zip(SHOWN, found, strict=True))
        graphs = counters["stats"]["unique_graphs"]
        if mode != "eager" and graphs != 1:
            print(f"{mode}: {graphs} graphs were compiled for {len(lengths)} lengths", flush=True)


@pytest.mark.parametrize("mode", ["eager", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("kv_len", LENGTHS)
@torch.no_grad()
def test_layer(benchmark: Any, device: torch.device, kv_len: int, mode: str) -> None:
    """On a CPU a tiny layer, a sixteenth of the length and `default` for the mode that tunes."""
    on_gpu = device.type == "cuda"
    config, batch = (FULL, BATCH) if on_gpu else (MLAConfig.tiny(), 2)
    kv_len = kv_len if on_gpu else kv_len // 16
    layer = Layer(config, kv_len, device)
    inputs = make_inputs(config, batch, kv_len, make_cache(batch, kv_len, device))
    wanted = layer(*inputs).clone()
    torch._dynamo.reset()
    call = in_mode(layer, mode if on_gpu else mode.replace("max-autotune-no-cudagraphs", "default"))
    error = relative(call(*inputs), wanted)
    assert error <= CLOSE

    benchmark(call, *inputs)

    device_us = None
    if on_gpu and benchmark.enabled:
        device_us = timer.median(device_times(call, inputs, mode)[0])
    facts = {"mode": mode, "kv_len": kv_len, "weight_bytes": layer.weight_bytes, "error": error, "device_us": device_us}
    benchmark.extra_info |= facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", default=",".join(map(str, LENGTHS)), help="keys of a sequence (default %(default)s)")
    parser.add_argument(
        "--modes",
        default="reduce-overhead,max-autotune-no-cudagraphs,eager",
        help="modes of torch.compile, or eager (default %(default)s)",
    )
    given = parser.parse_args()
    modes = given.modes.split(",")
    if unknown := set(modes) - set(MODES):
        raise SystemExit(f"no mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    if not torch.cuda.is_available():
        raise SystemExit("the layer's benchmark needs a GPU; pytest benchmarks/bench_layer.py runs a tiny one on a CPU")
    AsyncCompile.use_process_pool()  # its processes start meanwhile
    ceilings = floors.measure(torch.device("cuda"))
    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"read {ceilings.gb_per_s:.0f} GB/s", flush=True)
    table = Table(None, shown=SHOWN)
    with torch.no_grad():
        for row in measure(sorted(map(int, given.kv.split(","))), modes, ceilings):
            table.add(row)


if __name__ == "__main__":
    main()
