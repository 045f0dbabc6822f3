"""Program: follow-ups of benchmarks/vllm_followups.py in a real vLLM engine on a CPU; prints what it finds as JSON.

A process of its own: the engine of these tests and that of the benchmarks are modules of one name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import conftest  # noqa: F401  # vLLM's settings

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))

import tiny_deepseek  # noqa: E402
import vllm_engine as benchmark_engine  # noqa: E402
import vllm_followups  # noqa: E402
import vllm_model  # noqa: E402

spec = importlib.util.spec_from_file_location("cpu_engine", HERE / "vllm_engine.py")
cpu_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cpu_engine)

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
    vllm_followups.VOCAB = benchmark_engine.VOCAB = tiny_deepseek.VOCAB
    benchmark_engine.MAX_TOKENS = tiny_deepseek.MAX_LEN - OPTIONS.context
    vllm_model.Contexts.install()
    split = vllm_model.Split.install()
    settings = dict(chunks=tiny_deepseek.MAX_LEN, block_size=16, **vllm_model.Contexts.SETTINGS)
    with TemporaryDirectory() as folder:
        tiny_deepseek.save_model(Path(folder))
        with cpu_engine.engine(Path(folder), ours=True, **settings) as llm:
            follow = vllm_followups.FollowUps(llm, split, OPTIONS)
            checked = follow.check()
            rows = [row for decodes in (0, 3) for row in follow.measure(decodes, 32)["rows"]]
    print(json.dumps({"checked": checked, "rows": rows, "steps": follow.steps}))


if __name__ == "__main__":
    main()
