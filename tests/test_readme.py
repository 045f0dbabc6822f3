"""The README's code runs as it stands, and its generated table is the one the tree gives."""

import re
from pathlib import Path

from mla_suite.cli import support

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_support_table_is_current() -> None:
    shown = re.search(r"<!-- support:begin.*?-->\n(.*?)<!-- support:end -->", README, re.S)
    assert shown is not None
    assert shown[1].strip() == support.table(), "run `python -m mla_suite support --write README.md`"
