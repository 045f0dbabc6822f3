"""An engine with two worker processes, which counts in each of them what reached our decode."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def on_cpu() -> None:
    """Entry point: put the class that is registered as CUSTOM behind CPU_MLA, and count its calls in a file."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.CUSTOM.get_path())
    from mla_suite.integrations.vllm import MLASuiteImpl

    if hasattr(MLASuiteImpl, "counted"):
        return
    MLASuiteImpl.counted, forward = True, MLASuiteImpl.forward_mqa

    def counted(self, *args):
        with open(f"{os.environ['MLA_SUITE_TEST_CALLS']}.{os.getpid()}", "a") as calls:
            calls.write(".")
        return forward(self, *args)

    MLASuiteImpl.forward_mqa = counted


def main() -> None:
    import vllm_engine

    folder, batch = Path(sys.argv[1]), json.loads(sys.argv[2])
    with vllm_engine.engine(folder, ours=False, tensor_parallel_size=2) as llm:
        tokens, _ = vllm_engine.generate(llm, batch)
    print(json.dumps(tokens))


if __name__ == "__main__":
    main()
