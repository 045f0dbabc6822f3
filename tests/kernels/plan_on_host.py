"""sm_90's plan kernels compiled for a CPU, and problems for them (tests/kernels/cuda_on_host/plan)."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mla_suite import archs
from mla_suite.archs import CSRC
from mla_suite.archs import plan as native
from mla_suite.archs.plan import PlanConfig
from mla_suite.archs.sm_90 import PLAN_WAVES
from mla_suite.build.params import load
from mla_suite.ops.plan import PLAN, reference

HOST = Path(__file__).parent / "cuda_on_host" / "plan"
SM_90 = archs.get("sm_90")
CONFIG = PlanConfig(SM_90, PLAN_WAVES)
KERNELS = sorted({(step, waves) for step, both in PLAN_WAVES for waves in both})
CHECKS = "-fsanitize=thread,bounds,signed-integer-overflow,shift,integer-divide-by-zero"
OPTIONS = ("-std=c++17", "-w", f"-I{HOST}", "-include", str(HOST / "cuda.hpp"))
SM_PARTS = (1, 33, 66, 78, 114, 132, 228)


class Problem(NamedTuple):
    """A call of plan."""

    lens: tuple[int, ...]
    rows: int
    num_sm_parts: int
    cu_seqlens_q: tuple[int, ...] | None = None
    max_seqlen_kv: int = 0
    num_splits: int = 0
    split_size: int = 0
    max_seqlen_q: int = 1
    window_left: int = -1


class Found(NamedTuple):
    """The plans of a run, or what stopped it."""

    plans: list[np.ndarray]
    error: str


def compiled(folder: Path, sources: Path = CSRC) -> Path:
    """The program that runs all KERNELS, made of `sources`."""
    objects = [folder / f"{step}_{waves}.o" for step, waves in KERNELS]
    for made, (step, waves) in zip(objects, KERNELS, strict=True):
        point = [f"-DSTEP={step}", f"-DWAVES={waves}", f"-DMLA_SUITE_KERNEL={made.stem}"]
        checks = ["-O1", CHECKS, "-fsanitize-undefined-trap-on-error"]
        entry = ["-x", "c++", "-c", str(sources / "sm_90" / "plan" / "plan.cu")]
        _run("g++", *OPTIONS, *checks, *point, f"-I{sources}", f"-I{CSRC}", *entry, "-o", str(made))
    names = " ".join(f"KERNEL({made.stem})" for made in objects)
    files = [str(HOST / "plan.cpp"), *map(str, objects), "-o", str(folder / "plan")]
    _run("g++", "-O2", *OPTIONS, f"-I{sources}", f"-I{CSRC}", f"-DKERNELS={names}", *files)
    return folder / "plan"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def definition(problem: Problem) -> np.ndarray:
    """The words of ops/plan/reference.py, for the arch that it takes for the current one."""
    lens = torch.tensor(problem.lens, dtype=torch.int32)
    queries = None if problem.cu_seqlens_q is None else torch.tensor(problem.cu_seqlens_q, dtype=torch.int32)
    own = ("max_seqlen_q", "num_sm_parts", "max_seqlen_kv", "num_splits", "split_size", "window_left")
    sizes = dict(num_heads=problem.rows // problem.max_seqlen_q, **{name: getattr(problem, name) for name in own})
    made = [torch.empty(output.shape, dtype=output.dtype) for output in PLAN.specify(lens, queries, **sizes)]
    reference.run(None, tuple(made), PLAN.Args(lens, queries, **sizes))
    return made[0].numpy()


def words_of_kernels(
    program: Path, problems: Sequence[Problem], sizes: Sequence[int], seed: int = 1, seconds: float = 600
) -> Found:
    """The words that the kernels make, with archs/plan.py's launches; `sizes` is the number of each plan's."""
    given = program.with_name(f"problems_{seed}")
    made = program.with_name(f"plans_{seed}")
    with given.open("wb") as file:
        for problem, words in zip(problems, sizes, strict=True):
            file.write(_packed(problem, words))
    try:
        command = [str(program), str(given), str(made), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Found([], f"no end in {seconds} s")
    if done.returncode != 0:
        return Found([], f"{done.returncode}: {done.stdout}{done.stderr}")
    return Found(np.split(np.fromfile(made, dtype=np.int32), np.cumsum(sizes)[:-1]), "")


def _packed(problem: Problem, words: int) -> bytes:
    split = problem.max_seqlen_kv, problem.num_splits, problem.split_size
    batch, window = len(problem.lens), (problem.max_seqlen_q, problem.window_left)
    numbers, groups = native.numbers_and_groups(CONFIG, batch, problem.rows, problem.num_sm_parts, *split, *window)
    params = load("plan").pack(**numbers, seq_lens=0, cu_seqlens_q=0, plan=0)
    queries, steps = problem.cu_seqlens_q or (), native.steps(problem.num_splits, problem.split_size)
    head = batch, bool(queries), words, len(steps), len(params) // 4
    waves = [CONFIG.waves_of(step, batch) for step in steps]
    launches = [
        (KERNELS.index((step, most)), groups[step], most * SM_90.wavefront)
        for step, most in zip(steps, waves, strict=True)
    ]
    ints = [*head, *(number for launch in launches for number in launch)]
    after = [*problem.lens, *queries]
    return struct.pack(f"<{len(ints)}i", *ints) + params + struct.pack(f"<{len(after)}i", *after)


def drawn(draw: random.Random, max_batch: int) -> Problem:
    """A problem of any kind of lengths; each third is ragged, as plans are that deal sequences out of order."""
    if draw.random() < 1 / 3:
        longest = draw.choice((700, 4096, 8192, 16384))
        lens = tuple(draw.randint(1, longest) for _ in range(draw.randint(1, min(256, max_batch))))
        return Problem(lens, draw.choice((16, 64, 128, 256)), draw.choice(SM_PARTS[1:]))
    batch = min(max_batch, draw.choice((1, 2, draw.randint(1, 32), draw.randint(33, 160), draw.randint(161, 512))))
    longest = draw.choice((1, 64, 700, 4096, 8192, 32768, 200_000))
    kinds = {
        "none": lambda: [draw.choice((0, 1)) for _ in range(batch)],
        "equal": lambda: [draw.randint(0, longest)] * batch,
        "uniform": lambda: [draw.randint(0, longest) for _ in range(batch)],
        "tails": lambda: [min(int(60 * draw.paretovariate(0.8)), 10**7) for _ in range(batch)],
        "giant": lambda: [draw.choice((10**5, 10**6, 2**31 - 1)), *(draw.randint(0, 700) for _ in range(batch - 1))],
        "blocks": lambda: [64 * draw.randint(0, 9) + draw.choice((-1, 0, 0, 1)) for _ in range(batch)],
    }
    lens = [max(length, 0) for length in kinds[draw.choice(list(kinds))]()]
    draw.shuffle(lens)
    queries = None
    if draw.random() < 0.25:
        counts = [draw.choice((0, 1, 1, 4)) for _ in lens]
        queries = tuple(np.cumsum([0, *counts]).tolist())
    window = {} if draw.random() < 0.6 else dict(max_seqlen_q=1, window_left=draw.choice((0, 63, 500, 4096)))
    rows = draw.choice((1, 16, 24, 128, draw.randint(1, 512)))
    split = draw.choice(({}, {}, {}, {}, {}, {}, {"num_splits": draw.randint(1, 40)}, {"split_size": 1}))
    if "split_size" in split:
        most = min(max(lens), 10**5)
        split = {"split_size": 64 * draw.randint(1, 20), "max_seqlen_kv": max(1, draw.choice((most, most // 2)))}
    return Problem(tuple(lens), rows, draw.choice(SM_PARTS), queries, **split, **window)
