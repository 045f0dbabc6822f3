"""docs/ci_owner.md lists the environment variables: every one that the code reads, and none that nothing reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "ci_owner.md").read_text().split("\n## Environment variables\n")[1].split("\n## ")[0]
DOCUMENTED = {name for row in re.findall(r"^\| (`.+?) \|", GUIDE, re.M) for name in re.findall(r"`([A-Z_\d]+)", row)}


def names_read(*places: str) -> set[str]:
    """Names in `os.environ["NAME"]`, `os.environ.get("NAME")` and `os.getenv("NAME")` of files and folders.

    Where the name is not written in place, its expression, which no guide lists.
    """
    found = set()
    for place in places:
        for path in (ROOT / place).rglob("*.py") if (ROOT / place).is_dir() else [ROOT / place]:
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "environ" in text or "getenv" in text else ():
                read: ast.expr | None = None
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                    read = node.args[0]
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                    read = node.slice if ast.unparse(node.value) == "os.environ" else None
                if read is not None:
                    found.add(str(read.value) if isinstance(read, ast.Constant) else ast.unparse(read))
    return found


def test_variables_are_read_and_documented():
    read = names_read("mla_suite", "ops", "benchmarks", "examples", "setup.py", "toxfile.py")
    read |= {name for name in names_read("tests", "tools") if "MLA_SUITE" in name}
    read |= set(re.findall(r"\{env:(\w+):", (ROOT / "tox.ini").read_text()))
    assert not read - DOCUMENTED, "docs/ci_owner.md does not list these"
    assert not DOCUMENTED - read, "docs/ci_owner.md lists these, which nothing reads"
