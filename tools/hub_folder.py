"""Build a kernels-hub folder and decode from it: `tox -e hub`.

FOLDER/build/torch-universal becomes the variant that serves every version of torch: the Python package, code objects of
all archs that were built, a loader, and metadata.json with the digest of every file. `kernels.get_local_kernel` then
loads it in a fresh process, which decodes with the reference and with a code object in the emulator.
"""

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from check_wheel import CHECK

from mla_suite import __version__
from mla_suite.build import manifest

ROOT = Path(__file__).parents[1]
VARIANT = "torch-universal"
SOURCES = ("*.py", "*.csv", "*.toml", "*.hip", "*.cu", "*.hpp", "*.cpp")

LOADER = '''"""mla_suite from a kernels-hub folder: `kernels.get_kernel` imports this file."""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).parent / "mla_suite"
if "mla_suite" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "mla_suite", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    sys.modules["mla_suite"] = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(sys.modules["mla_suite"])
    except BaseException:
        del sys.modules["mla_suite"]
        raise
elif Path(sys.modules["mla_suite"].__file__).parent != _folder:
    raise ImportError(
        f"mla_suite is imported already, from {sys.modules['mla_suite'].__file__}; its operators are registered once a "
        "process: use that one, or load this folder first"
    )

from mla_suite import append_kv, combine, convert_kv, debug, decode, emulate, explain, kv_formats, plan, sparse_decode

__version__ = sys.modules["mla_suite"].__version__
__all__ = ["append_kv", "combine", "convert_kv", "debug", "decode", "emulate", "explain", "kv_formats", "plan"]
__all__ += ["sparse_decode"]
'''

PROGRAM = """
import sys
from pathlib import Path
from kernels import get_local_kernel

mla_suite = get_local_kernel(Path(sys.argv[1]))
assert sys.modules["mla_suite"].__file__.startswith(sys.argv[1]), "another copy was imported"
"""
COMPILED = """
compiled = torch.compile(mla_suite.decode, fullgraph=True)
assert torch.equal(*(decode(*call, softmax_scale=192**-0.5)[0] for decode in (compiled, mla_suite.decode)))
"""


def assemble(folder: Path) -> Path:
    """Write the variant from the sources and from the objects that `python -m mla_suite build` left; returns it."""
    objects = ROOT / "mla_suite" / "objects"
    variant = folder / "build" / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    package = variant / "mla_suite"
    for pattern in SOURCES:
        for part in ("mla_suite", "ops", "csrc"):
            for path in sorted((ROOT / part).rglob(pattern)):
                inner = path.relative_to(ROOT / "mla_suite") if part == "mla_suite" else path.relative_to(ROOT)
                if inner.parts[0] != "objects":
                    copy(path, package / inner)
    for name in manifest.read(objects).files():
        copy(objects / name, package / "objects" / name)
    (variant / "__init__.py").write_text(LOADER)
    files = {str(path.relative_to(variant)): digest(path) for path in sorted(variant.rglob("*")) if path.is_file()}
    metadata = {
        "id": f"_mla_suite_{hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]}",
        "name": "mla-suite",
        "version": int(__version__.split(".")[0]),
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return variant


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def decode_from(folder: Path) -> None:
    """Load the folder in a process that finds no other mla_suite, and decode."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-c", PROGRAM + CHECK + COMPILED, str(folder.resolve())]
        subprocess.run(command, cwd=elsewhere, env=environment | {"HF_HUB_OFFLINE": "1"}, check=True)


def main(folder: Path) -> None:
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    variant = assemble(folder)
    written = Metadata.read_from_file(variant / "metadata.json").digest
    assert written is not None
    written.validate(Digest.hash_variant(written.algorithm, variant))
    assert written.algorithm == DigestAlgorithm.SHA256
    decode_from(folder)
    size = sum(path.stat().st_size for path in variant.rglob("*") if path.is_file())
    print(f"{variant}: {len(written.files)} files, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where it is built")
    main(parser.parse_args().folder)
