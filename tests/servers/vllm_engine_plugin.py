"""Processes of vLLM that find our backend as an installed package, and count what reached our decode.

As a program it runs an engine with two worker processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]


def environment(folder: Path) -> dict[str, str]:
    """Variables for a process in which this package is installed, by an entry of `folder` that names its plugins."""
    installed = folder / "mla_suite-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mla_suite\nVersion: 0\n")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    # On a CPU vLLM ignores CUSTOM, so a second function puts the registered class behind the name it does not ignore.
    lines = [f"{name} = {value}" for name, value in {**declared, "on_cpu": "vllm_engine_plugin:on_cpu"}.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(Path(__file__).parent)]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "MLA_SUITE_TEST_CALLS": str(folder / "calls"),
    }


def counts(folder: Path) -> list[int]:
    """How many calls reached our decode, by process."""
    return [len(path.read_text()) for path in folder.glob("calls.*")]


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
