"""The README's code runs as it stands, and its generated tables are those the tree gives."""

import re
from pathlib import Path

from mla_suite.cli import latency, marked, support

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_support_table_is_current() -> None:
    assert marked.section(README, "support") == f"{support.table()}\n", "run `mla_suite support --write README.md`"


def test_latency_tables_are_current() -> None:
    made = latency.section(sorted((ROOT / latency.RESULTS).glob("*.json")))
    assert marked.section(README, "latency") == f"{made}\n", "run `python -m mla_suite latency --write README.md`"
