"""Program: stands for an engine of benchmarks/bench_vllm.py that takes turns with others, and answers what it is asked.

Attention takes half as long with any backend but A, whose tokens are others.
"""

import sys

import vllm_turns


def option(name: str) -> str:
    """The last value of an option, as a parser would have it; its default is 0."""
    words = ["--heads", "0", *sys.argv]
    return words[len(words) - words[::-1].index(name)]


BACKEND, HEADS = option("--alone"), int(option("--heads"))
rounds = 0


def check():
    print("a line that goes through")
    return {"compared": 1, "error": 1e-3, "tokens": [[1, 2 if BACKEND == "A" else 3]], "gaps": [[1.0, 1.0]]}


def start(batch, context):
    global rounds
    rounds = 0
    return {"prompts": batch}


def one_round():
    global rounds
    rounds += 1
    return {"tokens_per_s": 10.0 * rounds}


def profile(batch):
    return {"step_us": batch * 1e4, "attention_us": 30.0 if BACKEND == "A" else 15.0, "plan_us": 0.0}


def measure(decodes, prefix):
    row = {"prefix": prefix, "new": 8, "decodes": decodes, "threshold": "own", "keys": "absorbed", "kernels": BACKEND}
    return {"rows": [row | {"busy_us": 8.0 * HEADS, "per_layer_us": HEADS, "first_ms": 1.0, "decode_us": 2.0}]}


answers = {"check": check, "start": start, "round": one_round, "profile": profile, "measure": measure}
raise SystemExit(vllm_turns.serve({"seconds": 1, "page": 64}, answers))
