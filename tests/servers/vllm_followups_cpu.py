"""Program: follow-ups of benchmarks/vllm_followups.py in a real vLLM engine on a CPU; prints what it finds as JSON.

A process of its own, since it changes constants of the benchmarks and functions of vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import conftest  # noqa: F401  # vLLM's settings

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tiny_deepseek
import vllm_cpu
import vllm_engine
import vllm_followups
import vllm_model

OPTIONS = argparse.Namespace(
    alone="CUSTOM",
    prefixes=(32,),
    new=(4, 12, 20),
    decodes=3,
    context=48,
    thresholds=(1, 16),
    layers=tiny_deepseek.LAYERS,
)


def main() -> None:
    vllm_followups.VOCAB = vllm_engine.VOCAB = tiny_deepseek.VOCAB
    vllm_engine.MAX_TOKENS = tiny_deepseek.MAX_LEN - OPTIONS.context
    vllm_model.Contexts.install()
    split = vllm_model.Split.install()
    settings = dict(chunks=tiny_deepseek.MAX_LEN, block_size=16, **vllm_model.Contexts.SETTINGS)
    with TemporaryDirectory() as folder:
        tiny_deepseek.save_model(Path(folder))
        with vllm_cpu.engine(Path(folder), ours=True, **settings) as llm:
            follow = vllm_followups.FollowUps(llm, split, OPTIONS)
            checked = follow.check()
            rows = [row for decodes in (0, 3) for row in follow.measure(decodes, 32)["rows"]]
    print(json.dumps({"checked": checked, "rows": rows, "steps": follow.steps}))


if __name__ == "__main__":
    main()
