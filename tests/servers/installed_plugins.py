"""A folder that names the plugins of this package as if it were installed there, and the calls that they write down."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[2]


def install(folder: Path, group: str, **more: str) -> dict[str, str]:
    """Declare this package's entry points of `group`, and `more`, in `folder`; return the variables for a process."""
    installed = folder / "mla_suite-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mla_suite\nVersion: 0\n")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    lines = [f"{name} = {value}" for name, value in {**declared, **more}.items()]
    (installed / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(Path(__file__).parent)]),
        "MLA_SUITE_TEST_CALLS": str(folder / "calls"),
    }


def write_call(**row: Any) -> None:
    """Add a row to the file of this process."""
    with open(f"{os.environ['MLA_SUITE_TEST_CALLS']}.{os.getpid()}", "a") as written:
        written.write(json.dumps(row) + "\n")


def calls(folder: Path) -> list[list[dict[str, Any]]]:
    """The rows, by process."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("calls.*")]
