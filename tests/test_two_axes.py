"""Two axes, two places: names of archs and vendors, and tests of configuration types, stay where hardware is known."""

import ast
import re

import pytest
from test_imports import MODULES, ROOT

# Folders and files that know hardware. Tuned tables, kernels, packaging files, documents and tests are no Python here.
KNOW_HARDWARE = (
    "mla_suite/archs/",
    "mla_suite/emulator/",
    "mla_suite/build/",
    "mla_suite/launch/cuda.py",
    "mla_suite/launch/hip.py",
)
CHOICES = "mla_suite/cli/"  # choices and help of the command line name archs; code that decides does not
# Names of another project's own, which stand for nothing else there.
FOREIGN = {
    "mla_suite/integrations/vllm_rocm.py": r"vllm\.models\.deepseek_v4\.amd\.rocm",
    "mla_suite/integrations/vllm_v4.py": r"\{package\}\.(nvidia|amd)\.",
}
NAMES = re.compile(r"gfx\d|sm_\d\d|hopper|cdna|\bnvidia\b|\bamd\b|\bvendor\b", re.IGNORECASE)


SOURCES = sorted(path.relative_to(ROOT).as_posix().replace("mla_suite/ops/", "ops/") for path in MODULES.values())
"""Python files of the package and the operators."""


@pytest.mark.parametrize("name", [n for n in SOURCES if not n.startswith((*KNOW_HARDWARE, CHOICES))])
def test_no_arch_or_vendor_is_named(name):
    """Comments and docstrings too: a device on which a number was measured has a product's name."""
    lines = enumerate((ROOT / name).read_text().splitlines(), start=1)
    foreign = FOREIGN.get(name, "$^")
    named = [f"{name}:{n}: {line}" for n, line in lines if NAMES.search(re.sub(foreign, "", line))]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("name", [n for n in SOURCES if n.startswith(CHOICES)])
def test_no_command_decides_by_a_name(name):
    """A command may list archs as choices and name them in prose; it compares none and asks for no vendor."""
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        assert not (isinstance(node, ast.Attribute) and NAMES.search(node.attr)), f"{name}:{node.lineno}: .{node.attr}"
        assert not (isinstance(node, ast.Name) and NAMES.search(node.id)), f"{name}:{node.lineno}: {node.id}"
        if isinstance(node, ast.Compare | ast.match_case):
            compared = ast.unparse(node)
            assert not NAMES.search(compared), f"{name}: {compared}"


SHARED = tuple(f"mla_suite/archs/{part}" for part in ("attention.py", "sparse_attention.py", "combine.py", "cdna/"))


@pytest.mark.parametrize("name", [n for n in SOURCES if n.startswith(SHARED) or not n.startswith("mla_suite/archs/")])
def test_no_configuration_is_tested_for_its_type(name):
    """An arch's differences are its methods, in the code that archs share too."""
    assert not re.findall(r"isinstance\([^()]*config[^()]*\)", (ROOT / name).read_text())
