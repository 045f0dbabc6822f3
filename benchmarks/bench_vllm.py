"""vLLM with this package's attention backend beside vLLM's own: steps of its engine, or its server under load.

    python benchmarks/bench_vllm.py engine --csv FILE
    python benchmarks/bench_vllm.py followups --csv FILE
    python benchmarks/bench_vllm.py server --csv FILE

`python benchmarks/bench_vllm.py engine --help` and so on say what each measures.
"""

from __future__ import annotations

import argparse

import vllm_engine
import vllm_followups
import vllm_server

COMMANDS = {
    "engine": vllm_engine,
    "followups": vllm_followups,
    "server": vllm_server,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        own = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(own)
    options = parser.parse_args()
    return COMMANDS[options.command].main(options)


if __name__ == "__main__":
    raise SystemExit(main())
