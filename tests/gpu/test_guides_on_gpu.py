"""The guides' Python blocks that need a GPU, each as a program of its own; tests/test_docs.py runs the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_docs import PAGES, Block, blocks, run_python

FOUND = [
    (page, block) for page in PAGES for block in blocks(page) if (block.language, block.needs) == ("python", "gpu")
]


@pytest.mark.parametrize(("page", "block"), FOUND, ids=[f"{page.stem}-{block.line}" for page, block in FOUND])
def test_a_block_runs(page: Path, block: Block) -> None:
    torch._dynamo.reset()
    run_python(compile("\n" * block.line + block.text, str(page), "exec"), block, {})
