"""plan and append_kv on a GPU: what a decode step pays beside attention.

    python benchmarks/bench_step.py [--op plan|append_kv]

plan: for 1 to 512 sequences, 16 and 128 query rows each, SM parts as the device has. `warm` is plan after plan
by replay of a CUDA graph. `cold` is what plan adds behind a kernel that reads more than the L2 holds, so that lengths,
instructions and the plan's memory come from HBM. The goals are 4 us for one sequence and 6 us for 128, cold.

append_kv: one new bf16 row per token, with rope, to random slots of pages of 64; inputs rotate through more memory than
the L2 holds, or are cold as above where they are few. `copy` is torch's copy of as many bytes, launch included.

Every result is compared with the definition first, on the same device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_suite.bench import inputs, stream_kernel
from mla_suite.bench.inputs import Call, rotation
from mla_suite.bench.timer import Replay, cold_bytes, median
from mla_suite.core import register
from mla_suite.core.op import Op, Sample
from mla_suite.launch.launcher import compute_units
from mla_suite.ops.append_kv.samples import sample as append_sample
from mla_suite.ops.plan import sm_parts
from mla_suite.ops.plan.samples import sample as plan_sample

BATCHES = (1, 8, 32, 128, 512)
TOKENS = (1, 128, 8192, 65536)
LONGEST = 8192
REST_S = 0.05
MAX_TURNS = 64


def time_of(replay: Replay) -> float:
    return median([replay.round(REST_S) for _ in range(3)])


def added(call: Callable[[Any], object], turns: Sequence[Any], device: torch.device) -> float:
    """Microseconds that a call adds behind a kernel which reads more than the L2 holds: the difference of two graphs,
    whose rounds are in turns.
    """
    words = torch.zeros(cold_bytes(device) // 65536 * 16384, dtype=torch.int32, device=device)
    sink = torch.empty(1, dtype=torch.int32, device=device)
    units = compute_units(device)

    def flush(turn: Any) -> None:
        stream_kernel.read(words, sink, stream_kernel.SHAPES[0], units)

    def both(turn: Any) -> None:
        flush(turn)
        call(turn)

    with_call, alone = Replay(both, turns), Replay(flush, turns)
    return median([with_call.round(REST_S) - alone.round(REST_S) for _ in range(5)])


def checked(op: Op, call: Call) -> None:
    """AssertionError where the operator's bytes are not those of its definition on this device."""
    right = inputs.by_definition(op, call)
    operator = getattr(torch.ops.mla_suite, op.name)
    if op.mutates:
        got: tuple[torch.Tensor, ...] = inputs.result(op, lambda outputs, *a, **k: operator(*a, **k), call)
    else:
        got = (operator(*call.args, **call.kwargs),)
    for mine, theirs in zip(got, right, strict=True):
        if not torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            raise AssertionError(f"{op.name} differs from its definition")


def plan_case(batch: int, rows: int, device: torch.device) -> Sample:
    """Lengths uniform up to LONGEST; one sequence is as long as that."""
    generator = torch.Generator().manual_seed(batch)
    lens = torch.randint(1, LONGEST + 1, (batch,), generator=generator)
    lens[0] = LONGEST
    num_sm_parts = sm_parts(torch.empty(0, device=device), rows)
    return plan_sample(lens.tolist(), num_heads=rows, num_sm_parts=num_sm_parts, max_seqlen_kv=LONGEST)


def show_plan(device: torch.device) -> None:
    op = register.get("plan")
    print("plan                     warm us   cold us")
    for rows in (16, 128):
        for batch in BATCHES:
            first = Call(*plan_case(batch, rows, device).make(device))
            checked(op, first)
            turns = [first, *(inputs.copy(first) for _ in range(7))]

            def call(turn: Call) -> object:
                return torch.ops.mla_suite.plan(*turn.args, **turn.kwargs)

            warm = time_of(Replay(call, turns))
            print(f"B{batch:<4d} {rows:4d} rows        {warm:9.2f} {added(call, turns, device):9.2f}", flush=True)


def show_append(device: torch.device) -> None:
    op = register.get("append_kv")
    print("append_kv                     us      GB/s   copy us   ratio")
    for tokens in TOKENS:
        sample = append_sample(tokens, "bf16", rope=True)
        first = Call(*sample.make(device))
        checked(op, first)

        def call(turn: Call) -> object:
            return torch.ops.mla_suite.append_kv(*turn.args, **turn.kwargs)

        pairs = [[torch.zeros(max(sample.bytes // 8, 1), dtype=torch.int32, device=device) for _ in "to"]]

        def copy(turn: list[torch.Tensor]) -> object:
            return turn[0].copy_(turn[1])

        if sample.bytes * MAX_TURNS >= cold_bytes(device):
            turns = rotation(first, sample.bytes, cold_bytes(device), MAX_TURNS)
            pairs += [[tensor.clone() for tensor in pairs[0]] for _ in turns[1:]]
            us, copy_us = time_of(Replay(call, turns)), time_of(Replay(copy, pairs))
        else:
            us, copy_us = added(call, [first], device), added(copy, pairs, device)
        rate = sample.bytes / us / 1e3
        print(f"{tokens:6d} tokens, rope   {us:11.2f} {rate:9.0f} {copy_us:9.2f} {us / copy_us:7.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--op", choices=("plan", "append_kv"), help="only this one")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_step: no GPU here")
    device = torch.device("cuda")
    print(torch.cuda.get_device_name())
    if options.op != "append_kv":
        show_plan(device)
    if options.op != "plan":
        show_append(device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
