"""Print saved bench runs as the latency section of the README.

  python -m mla_suite bench --set flashmla --save benchmarks/results/h200.json     measure, on the GPU
  python -m mla_suite latency --write README.md                                    then this, anywhere

Without files the runs are those of benchmarks/results beside the file that is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mla_suite.cli import marked

RESULTS = Path("benchmarks") / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", type=Path, help="files of bench --save")
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the section between FILE's latency markers")


def run(args: argparse.Namespace) -> int:
    beside = args.write.resolve().parent if args.write else Path()
    made = section(args.runs or sorted((beside / RESULTS).glob("*.json")))
    if args.write is None:
        print(made)
        return 0
    marked.write(args.write, "latency", made)
    return 0


def section(runs: list[Path]) -> str:
    """The Markdown of these runs, one machine after the other. ValueError for a file that is no run."""
    from mla_suite.bench import markdown, record

    return markdown.latency([record.load(path) for path in runs])
