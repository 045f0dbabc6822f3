"""The emulator's host library: one compiler call over csrc/emulator, made again only when a source changed."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from mla_suite.archs import CSRC
from mla_suite.build.compilers import zig
from mla_suite.build.locations import BuildError, locked, sha256
from mla_suite.build.notes import Note

SOURCES = CSRC / "emulator"

TARGET = "x86_64-linux-gnu.2.28"
# -nostdlib++: zig would otherwise build libc++ from source, a minute and a half. glibc 2.28 is manylinux_2_28's.
# -ffp-contract=off: the same bits on every CPU.
FLAGS = (
    *("-x", "c++", "-nostdlib++", "-fno-exceptions", "-fno-rtti", "-O3", "-g0", "-std=c++17", "-shared", "-fPIC"),
    *("-target", TARGET, "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall"),
)


def missing() -> str | None:
    """The reason why this machine cannot compile the library, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it runs on x86-64, this machine is {platform.machine()}"
    return "its C++ compiler is not installed: `pip install ziglang`" if zig() is None else None


def source_hash(sources: Path = SOURCES) -> str:
    """sha256 over the compiler flags and every source of the library; compiled into it."""
    files = sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".hpp"))
    parts = [" ".join(FLAGS), *(f"{path.name} {sha256(path.read_bytes())}" for path in files)]
    return sha256("\n".join(parts).encode())


def library_command(out: Path, sources: Path = SOURCES) -> list[str]:
    """The one command that compiles and links the library; only where nothing is `missing`."""
    program = zig()
    assert program is not None
    files = sorted(str(path) for path in sources.glob("*.cpp"))
    define = f'-DEMULATOR_SOURCE_HASH="{source_hash(sources)}"'
    return [program, "cc", *FLAGS, define, *files, "-o", str(out)]


def build_library(folder: Path, sources: Path = SOURCES) -> Path:
    """`folder`/emulator.so, up to date. Two processes may call it at once.

    BuildError: another CPU than x86-64, no zig, or the compiler's own message.
    """
    why = missing()
    if why is not None:
        raise BuildError(f"the emulator's library cannot be compiled: {why}")
    library = folder / "emulator.so"
    note = Note(folder / "emulator.note", (library,))
    inputs = [source_hash(sources)]
    with locked(folder):
        for abandoned in folder.glob(".emulator.*.so"):  # by builds that were killed
            abandoned.unlink()
        if note.holds(inputs):
            return library
        temporary = folder / f".emulator.{os.getpid()}.so"
        command = library_command(temporary, sources)
        try:
            with TemporaryDirectory() as spare:
                environment = os.environ if _has_cache() else os.environ | {"ZIG_GLOBAL_CACHE_DIR": spare}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise BuildError(f"the compiler {command[0]} cannot be run: {error}") from error
        if done.returncode:
            temporary.unlink(missing_ok=True)
            raise BuildError(f"{done.stderr.strip()}\nthe emulator's library could not be compiled from {sources}")
        os.replace(temporary, library)
        note.write(inputs)
    return library


def _has_cache() -> bool:
    """Whether zig can write the cache that it keeps below the home directory. It does not compile without one."""
    if "ZIG_GLOBAL_CACHE_DIR" in os.environ:
        return True
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    cache = Path(home) / "zig"
    if not cache.is_absolute():
        return False
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(cache, os.W_OK | os.X_OK)
