"""The guides in docs/ do what they say: their code blocks run in order, a page like one program.

A fence is ```python or ```console. A line `print(...) # text` must print that text. In a console block each line that
begins with `$ ` is a command, run here when it is `python -m mla_suite` or a program of tools/, and the lines below it
must be in its output, in order, `...` standing for anything. A block that needs what a CPU machine may lack says so in
its fence, `needs=gpu` and the like. It is compiled, its imports from this package looked up, its commands' options
parsed; and run elsewhere: Python for a GPU, which stands alone, by tests/gpu/test_guides_on_gpu.py, registration with
the servers by tests/servers.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import runpy
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mla_suite.__main__ import main
from mla_suite.cli import COMMANDS
from mla_suite.core import tuning

ROOT = Path(__file__).parent.parent
TABLES = ("published_work", "servers_measured")  # claims and figures without code; tests of their own read them
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDES = [page for page in PAGES if page.stem not in TABLES]
LINKED = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "csrc").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
NEEDS = ("gpu", "network", "time", "server")
FENCE = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.M | re.S)
ASKED = re.compile(r"(?:--on |--arch |--emulate |emulate\(\")(gfx\w+|sm_\w+)")
PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.M)


class Block(NamedTuple):
    """Code of a page: its language, what it needs beyond a CPU ('' for nothing), its first line and its text."""

    language: str
    needs: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    source = page.read_text()
    found = []
    for fence in FENCE.finditer(source):
        info = fence[2] or ""
        assert info == "" or info.startswith("needs="), f"{page.name}: a fence says {info!r}"
        needs = info.removeprefix("needs=")
        assert needs == "" or needs in NEEDS, f"{page.name}: needs={needs}; known are {NEEDS}"
        found.append(Block(fence[1], needs, source[: fence.start(3)].count("\n"), fence[3]))
    return found


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_runs(page, tmp_path, archs_left_out, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLA_SUITE_TUNED_DIR", str(tmp_path / "tuned"))
    tuning.clear_cache()
    torch._dynamo.reset()
    if "from transformers" in page.read_text():
        pytest.importorskip("transformers", reason="this guide needs transformers: pip install 'mla_suite[hf]'")
    asked = {arch for block in blocks(page) if not block.needs for arch in ASKED.findall(block.text)}
    lacking = asked & archs_left_out
    if lacking:
        pytest.skip(f"this guide runs kernels of {', '.join(sorted(lacking))}; run `python -m mla_suite build`")
    names: dict[str, Any] = {"__name__": page.stem}
    ran = 0
    for block in blocks(page):
        assert block.language in ("python", "console", "text", "toml", "hip"), f"{page.name}:{block.line}"
        if block.language == "python":
            # Empty lines first, so that a traceback names the guide's own line.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            look_up_imports(ast.parse(block.text))
            if not block.needs:
                run_python(code, block, names)
                ran += 1
        if block.language == "console":
            for command, expected in commands(block):
                if not block.needs:
                    run_command(command, expected, f"{page.name}:{block.line}")
                    ran += 1
                else:
                    parse_options(command)
    assert ran, "a guide without a block that runs shows nothing"


def run_python(code: Any, block: Block, names: dict[str, Any]) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, names)
    printed = iter(output.getvalue().splitlines())
    for expected in PRINTED.findall(block.text):
        assert expected in printed, f"{expected!r} is not what line {block.line}.. printed: {output.getvalue()}"


def commands(block: Block) -> list[tuple[str, list[str]]]:
    assert block.text.startswith("$ "), block.text
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:].split("  #")[0].strip(), []))
        elif line.strip():
            found[-1][1].append(" ".join(line.split()))
    return found


def run_command(command: str, expected: list[str], where: str) -> None:
    words = shlex.split(command)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        if words[1].startswith("tools/"):
            code = run_tool(*words[1:])
        else:
            assert words[:3] == ["python", "-m", "mla_suite"], f"{where}: {command} is not ours to run: say needs="
            code = main(words[3:])
    printed = output.getvalue()
    assert code == 0, f"{where}: {command} ended with {code}\n{printed}"
    lines = iter(" ".join(line.split()) for line in printed.splitlines())
    for text in expected:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in text.split("...")))
        assert any(pattern.search(line) for line in lines), f"{where}: {text!r} is not in\n{printed}"


def run_tool(program: str, *arguments: str) -> int:
    """A program of tools/ in this process, which has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        try:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def look_up_imports(tree: ast.AST) -> None:
    """Every name that a block imports from this package exists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mla_suite":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def parse_options(command: str) -> None:
    """A command of ours that is not run has options that exist."""
    words = shlex.split(command)
    if words[:3] != ["python", "-m", "mla_suite"]:
        return
    assert words[3] in COMMANDS, command
    module = importlib.import_module(f"mla_suite.cli.{words[3]}")
    parser = ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(words[4:])


def test_every_guide_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for page in PAGES:
        assert f"(docs/{page.name})" in readme


def anchors(page: Path) -> set[str]:
    """The names that links give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_declarations_are_those_of_the_file():
    """A toml block of the kernel engineers' guide quotes gfx942's `arch.toml`; a line `...` leaves out others."""
    (block,) = (block for block in blocks(ROOT / "docs" / "kernel_engineer.md") if block.language == "toml")
    lines = iter((ROOT / "csrc" / "gfx942" / "arch.toml").read_text().splitlines())
    for line in filter(str.strip, block.text.splitlines()):
        assert line.strip() == "..." or line in lines, f"{line!r} is not there, or not in this order"


def test_the_line_of_a_hang_waits():
    """The example of a debug build's message names a line of the function that it says, which waits."""
    guide = (ROOT / "docs" / "kernel_engineer.md").read_text()
    ((file, line, function),) = re.findall(r"^    (csrc/\S+):(\d+): (\w+): block:", guide, re.M)
    before = (ROOT / file).read_text().splitlines()[: int(line)]
    assert "wait(" in before[-1]
    assert f" {function}(" in before[-2]


def test_a_wrong_block_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```python\nprint(1 + 1)  # 3\n```\n```console\n$ python -m mla_suite formats\nno such line\n```\n"
    )
    first, second = blocks(page)
    with pytest.raises(AssertionError, match="'3' is not what line 2"):
        run_python(compile(first.text, "page", "exec"), first, {})
    with pytest.raises(AssertionError, match="'no such line' is not in"):
        run_command(*commands(second)[0], "page")
    with pytest.raises((SystemExit, Exception), match="unrecognized|2"):
        parse_options("python -m mla_suite bench --no-such-option")
