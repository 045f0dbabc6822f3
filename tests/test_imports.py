"""The layers of the package: imports run downwards, without circles, and need neither GPU, triton nor a compiler."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mla_suite"
LAYERS = {
    "kv_formats": 1,
    "core": 1,
    "archs": 1,  # the records of archs; their kernels are the part "native"
    "build": 2,
    "launch": 2,
    "emulator": 2,
    "ops": 3,
    "native": 4,
    "models": 4,
    "distributed": 5,
    "integrations": 5,
    "bench": 5,
    "cli": 5,
}
# Modules of the package itself. `__init__` names the operators, so it is in their layer: layers above may use it.
TOP = {"errors": 0.5, "__init__": 3, "testing": 2, "__main__": 6}
# Parts of one layer that may use each other, and operators that may use other operators.
SIBLINGS = {
    ("launch", "build"),
    ("launch", "emulator"),
    ("emulator", "launch"),
    ("emulator", "build"),
    ("kv_formats", "core"),
    ("core", "archs"),
    ("archs", "core"),
    ("core", "kv_formats"),
    ("cli", "integrations"),
    ("cli", "bench"),
    ("cli", "distributed"),
}
OPERATORS = {("decode", "plan"), ("decode", "combine"), ("sparse_decode", "decode"), ("sparse_decode", "plan")}
OPERATORS |= {("sparse_decode", "combine")}
OPERATORS |= {("append_kv", "sparse_decode"), ("convert_kv", "append_kv"), ("convert_kv", "sparse_decode")}


def sources() -> dict[str, Path]:
    """Every module of the package by dotted name, `ops` through its link."""
    found = {}
    for top in (PACKAGE, PACKAGE / "ops"):
        for path in sorted(top.rglob("*.py")):
            if "csrc" in path.parts or "__pycache__" in path.parts:
                continue
            parts = ("mla_suite", *path.relative_to(PACKAGE).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = sources()


def imports_of(name: str, path: Path) -> set[str]:
    """Modules of this package that a module imports, inside functions as well."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names if alias.name.split(".")[0] == "mla_suite")
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: relative import; name the module in full"
                if child.module and child.module.split(".")[0] == "mla_suite":
                    for alias in child.names:
                        inner = f"{child.module}.{alias.name}"
                        found.add(inner if inner in MODULES else child.module)
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            else:
                visit(child)

    visit(ast.parse(path.read_text()))
    return found - {name}


def part(name: str) -> str:
    names = name.split(".")
    if names[1:2] == ["archs"] and len(names) > 2 and names[2] != "spec":
        return "native"
    return names[1] if len(names) > 1 else "__init__"


def layer(name: str) -> int:
    return LAYERS.get(part(name), TOP.get(part(name), 0))


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_downwards(name):
    own, own_layer = part(name), layer(name)
    assert own_layer, f"{name} is in no layer; add its part to LAYERS"
    for target in imports_of(name, MODULES[name]):
        if part(target) == own or (name == "mla_suite" and layer(target) <= own_layer):
            continue
        above = layer(target) > own_layer
        sideways = layer(target) == own_layer and (own, part(target)) not in SIBLINGS
        assert not above, f"{name} (layer {own_layer}) imports {target} (layer {layer(target)})"
        assert not sideways, f"{name} imports its sibling {target}; only {sorted(SIBLINGS)} may"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("mla_suite.ops.")])
def test_operators_use_only_those_listed(name):
    own = name.split(".")[2]
    used = {target.split(".")[2] for target in imports_of(name, MODULES[name]) if target.startswith("mla_suite.ops.")}
    assert {(own, other) for other in used - {own}} <= OPERATORS


def test_no_circles():
    """Imports inside functions count: they may put a start or a dependency off, and never hide a circle.

    A package counts as importing what its `__init__` imports; importing a part of a package imports the package.
    """
    graph = {name: imports_of(name, path) for name, path in MODULES.items()}
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            # A package's own `__init__` may collect its parts.
            if not name.startswith(target + "."):
                walk(target, (*trail, name))
        done.add(name)

    for name in graph:
        walk(name, ())


def test_the_product_imports_nothing_of_the_workshop():
    """A wheel has neither tools/ nor tests/ nor benchmarks/, so no import of the package names a module there."""
    workshop = {path.stem for folder in ("tools", "tests", "benchmarks") for path in (ROOT / folder).glob("*.py")}
    workshop |= {path.parent.name for path in (ROOT / "tools").glob("*/__init__.py")} | {"tools", "tests", "benchmarks"}
    assert "check_hazards" in workshop
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong = {module for module in named if module.split(".")[0] in workshop}
            assert not wrong, f"{name} imports {wrong}, which a wheel does not have"


def run(code: str, *flags: str, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MLA_SUITE", "PYTHON"))}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, env=clean | environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_no_gpu_no_triton_no_compiler_and_brings_in_nothing_heavy(tmp_path):
    heavy = ("torch._dynamo", "torch._inductor", "torch.fx", "sympy", "matplotlib", "rich")
    code = f"""
import sys
asked = []
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "ninja", "ziglang", "transformers"):
            asked.append(name)
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import torch
before = set(sys.modules)
asked.clear()
import mla_suite
print(asked, [name for name in set(sys.modules) - before if name.startswith({heavy!r})])
lens = torch.tensor([3], dtype=torch.int32)
mla_suite.plan(lens, num_heads=1, num_sm_parts=1, max_seqlen_kv=3)
table, q, cache = lens[None] * 0, torch.ones(1, 1, 2, 8), torch.ones(1, 4, 8)
out, lse = mla_suite.decode(q, cache, lens, table, softmax_scale=1.0, head_dim_v=8, kv_format="fp32")
print(out.sum().item())
"""
    printed = run(code, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", PATH=str(tmp_path))
    assert printed.splitlines() == ["[] []", "16.0"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before 3.11 arch records need tomli, which -S hides with torch")
def test_without_torch_the_build_is_usable():
    code = """
import sys
sys.path.insert(0, ".")
import importlib.util
assert importlib.util.find_spec("torch") is None
import mla_suite, mla_suite.archs, mla_suite.kv_formats, mla_suite.core.tuning, mla_suite.build
assert not hasattr(mla_suite, "decode")
print(mla_suite.archs.get("gfx950").name, len(mla_suite.kv_formats.KV_FORMATS))
"""
    assert run(code, "-S", "-P").startswith("gfx950")


def test_a_module_is_reached_by_its_name():
    """The package binds functions, its folders stay modules: `mla_suite.ops.decode` has reference and samples."""
    import mla_suite
    import mla_suite.ops.decode as module

    assert module.reference.__name__ == "mla_suite.ops.decode.reference", module
    assert mla_suite.decode is module.decode
    assert mla_suite.ops.combine.__name__ == "mla_suite.ops.combine"
