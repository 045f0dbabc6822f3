"""Outputs in memory of inputs, through views with gaps too: refused, or right."""

import contextlib
import random
import re

import pytest
import torch
from torch.utils import _pytree as pytree

import mla_suite
from mla_suite.core import register

CPU = torch.device("cpu")
BACKENDS = ["reference", "gfx942", "gfx950"]
WRITING = [op for op in register.registry().values() if op.outputs or op.mutates]


def on(backend):
    return contextlib.nullcontext() if backend == "reference" else mla_suite.emulate(backend)


def place(draw, memory, like, at):
    """A view like a tensor in `memory` from byte `at` on, its rows further apart by a random number of elements."""
    gap = draw.choice([0, 0, 8, 64]) if like.dim() > 1 else 0
    strides, step = [], 1
    for number, extent in enumerate(reversed(like.shape)):
        strides.append(step)
        step = step * extent + (gap if number == 0 else 0)
    strides = strides[::-1]
    return memory[at:].view(like.dtype).as_strided(like.shape, strides)


def call_of(op, args, kwargs, outputs):
    packet = getattr(torch.ops.mla_suite, op.name)
    if op.mutates:
        packet(*args, **kwargs)
        return [args[position] for position in op.functional.known.mutated]
    packet.out(*args, **kwargs, **dict(zip(op.outputs, outputs, strict=True)))
    return outputs


def shared_problem(op, draw):
    """A call's arguments with one written tensor and one that is read in the same memory, and what it must give."""
    sample = draw.choice(op.samples())
    args, kwargs = sample.make(CPU)
    args = list(args)
    outputs = [torch.empty(o.shape, dtype=o.dtype) for o in op.specify(*args, **kwargs)] if op.outputs else []
    clean = [tensor.clone() for tensor in call_of(op, pytree.tree_map(copied, args), kwargs, outputs)]
    if op.mutates:
        written = args[op.functional.known.mutated[0]]
    else:
        number = draw.randrange(len(outputs))
        written = outputs[number]
    mutated = op.functional.known.mutated
    choices = [p for p, value in enumerate(args) if isinstance(value, torch.Tensor) and p not in mutated]
    position = draw.choice(choices)
    read = args[position]
    memory = torch.zeros(4 * (written.nbytes + read.nbytes) + 65536, dtype=torch.uint8)
    step = 16 * draw.randrange(max(1, (read.nbytes + written.nbytes) // 16))
    first = place(draw, memory, read, 0 if draw.random() < 0.5 else step)
    second = place(draw, memory, written, step if first.data_ptr() == memory.data_ptr() else 0)
    second.copy_(written)
    first.copy_(read)
    args[position] = first
    if op.mutates:
        before = written.clone()
        args[op.functional.known.mutated[0]] = second
        second.copy_(before)
        first.copy_(read)
    else:
        outputs[number] = second
    return args, kwargs, outputs, clean


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def check(op, backend, seed):
    draw = random.Random(seed)
    with on(backend):
        args, kwargs, outputs, clean = shared_problem(op, draw)
        try:
            found = call_of(op, args, kwargs, outputs)
        except ValueError as error:
            if not re.search("shares memory with|has strides", str(error)):
                raise
            return False
        for got, expected in zip(found, clean, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=f"seed {seed}")
        return True


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "500"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", WRITING, ids=lambda op: op.name)
def test_an_output_in_an_inputs_memory_is_refused_or_harmless(op, backend, full, seeded):
    times = 500 if full else 40 if backend == "reference" else 4
    results = {check(op, backend, seeded + number) for number in range(times)}
    assert False in results or backend != "reference"
