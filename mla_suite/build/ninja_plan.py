"""The commands that make objects from instances, and ninja, which runs those that are needed side by side.

`notes` says what is needed. The commands name their programs by environment variables, and a note holds a program's
hash, so a compiler that lies in another folder, as that of each isolated build of pip does, compiles nothing again.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from mla_suite.build import params, wait_states
from mla_suite.build.compilers import AmdCompiler, NvidiaCompiler
from mla_suite.build.instances import Instance
from mla_suite.build.locations import BuildError, sha256
from mla_suite.build.notes import Note

CLANG, LLD, NVCC, PYTHON = "MLA_SUITE_CLANG", "MLA_SUITE_LLD", "MLA_SUITE_NVCC", "MLA_SUITE_PYTHON"


class Plan:
    """The objects of a work folder, and what they are made from: sources under `csrc` with these hashes, and compilers.

    `folder` and `csrc` are absolute.
    """

    def __init__(
        self,
        folder: Path,
        csrc: Path,
        hashes: Mapping[str, str],
        amd: AmdCompiler | None,
        nvidia: NvidiaCompiler | None,
    ) -> None:
        self.folder, self.csrc, self.hashes, self.amd, self.nvidia = folder, csrc, hashes, amd, nvidia

    def note(self, item: Instance) -> Note:
        """The note on the files of an instance that a build reads."""
        stem = self.folder / item.arch.name / item.id
        suffixes = (".s", ".hsaco") if item.arch.vendor == "amd" else (".cubin", ".log")
        return Note(stem.with_name(item.id + ".note"), tuple(stem.with_name(item.id + suffix) for suffix in suffixes))

    def is_current(self, item: Instance) -> bool:
        """Whether the instance need not be made."""
        note = self.note(item)
        return note.holds(self._inputs(item, note.sources()))

    def make(
        self, items: Sequence[Instance], jobs: int | None, progress: Callable[[int, int], None] | None = None
    ) -> str:
        """Makes instances and notes from what; returns the compilers' warnings. BuildError as of `run`."""
        lines = ["ninja_required_version = 1.5"]
        for item in items:
            (self.folder / item.arch.name).mkdir(parents=True, exist_ok=True)
            checks = self._checks(item)
            checks.parent.mkdir(exist_ok=True)
            checks.write_text(self._asserts(item), encoding="utf-8")
            for path in self.note(item).outputs:
                path.unlink(missing_ok=True)
            name = f"{item.arch.name}/{item.id}"
            rule, command = re.sub(r"\W", "_", name), self._command(item).replace("$", "$$")
            # The plan holds only what is to be made, so an output can be a name without a file.
            lines += [f"rule {rule}", f"  command = {command}", f"  description = {name}", f"build {name}: {rule}"]
        (self.folder / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")
        named = {f"{item.arch.name}/{item.id}": item for item in items}

        def write_note(name: str) -> None:
            item = named[name]
            sources = dependencies(self.folder / f"{name}.d", self.csrc)
            self.note(item).write(self._inputs(item, sources), sources)

        return run(self.folder, self._programs(), jobs, write_note, progress)

    def _inputs(self, item: Instance, sources: Sequence[str]) -> list[str]:
        """All that decides the bytes of an instance, but where the folders lie."""
        command = self._command(item).replace(str(self.folder), "generated").replace(str(self.csrc), "csrc")
        identity = self._amd_identity if item.arch.vendor == "amd" else self._nvidia_identity
        return [command, identity, self._asserts(item), *(f"{name} {self.hashes.get(name)}" for name in sources)]

    @cached_property
    def _amd_identity(self) -> str:
        assert self.amd is not None
        checked = "" if self.amd.pinned else wait_states.identity()
        return f"{self.amd.version} {sha256(Path(self.amd.clang[0]).read_bytes())} {checked}"

    @cached_property
    def _nvidia_identity(self) -> str:
        assert self.nvidia is not None
        return f"{self.nvidia.version} {sha256(Path(self.nvidia.nvcc).read_bytes())}"

    def _programs(self) -> dict[str, str]:
        found = {PYTHON: sys.executable}
        if self.amd is not None:
            found |= {CLANG: self.amd.clang[0], LLD: self.amd.lld[0]}
        return found if self.nvidia is None else found | {NVCC: self.nvidia.nvcc}

    def _checks(self, item: Instance) -> Path:
        """The generated header with the layout asserts of an instance's parameter struct."""
        return self.folder / "params" / f"{item.params}.hpp"

    def _asserts(self, item: Instance) -> str:
        try:
            return "#pragma once\n" + params.load(item.params, self.csrc).static_asserts()
        except (FileNotFoundError, ValueError) as error:
            raise BuildError(f"{item.arch.name} {item.id}: {error}") from error

    def _command(self, item: Instance) -> str:
        """The line for a shell in `folder` that makes the files of an instance."""
        defines = [f"-D{key}={value}" for key, value in item.constants.items()]
        defines += [f"-DMLA_SUITE_KERNEL={item.symbol}", f"-I{self.csrc}", "-include", str(self._checks(item))]
        source, stem = str(self.csrc / item.source), f"{item.arch.name}/{item.id}"
        if item.arch.vendor != "amd":
            assert self.nvidia is not None
            dependencies = ["-MD", "-MF", f"{stem}.d", "-MT", f"{stem}.cubin"]
            command = [*self.nvidia.to_object(item.arch.name), *defines, *dependencies, source, "-o", f"{stem}.cubin"]
            log = shlex.quote(f"{stem}.log")
            compiled = f"{_line(NVCC, command)} > {log} 2>&1 || {{ cat {log}; exit 1; }}"
            return f"{compiled}; grep -i -A 3 warning {log} || true"
        assert self.amd is not None
        compile_command = [
            *self.amd.to_assembly(item.arch.name),
            # The text names its sources relative to csrc: the same bytes from any directory.
            f"-ffile-prefix-map={self.csrc}=csrc",
            f"-ffile-prefix-map={self.folder}=generated",
            *defines,
            # -MD of a device-only HIP compile writes nothing in some clang builds; the front end's own flag does.
            *_each("-Xclang", "-dependency-file", f"{stem}.d", "-MT", f"{stem}.s"),
            *("-S", source, "-o", f"{stem}.s"),
        ]
        assemble = [*self.amd.to_relocatable(item.arch.name), f"{stem}.s", "-o", f"{stem}.o"]
        link = [*self.amd.to_object(), f"{stem}.o", "-o", f"{stem}.hsaco"]
        lines = [_line(CLANG, compile_command), _line(CLANG, assemble), _line(LLD, link)]
        if not self.amd.pinned:
            said = shlex.quote(f"{stem}.hazards")
            check = _line(PYTHON, [sys.executable, *wait_states.arguments(item.arch.name, f"{stem}.s")])
            lines.append(f"{{ {check} > {said} || {{ cat {said}; exit 1; }}; }}")
        return " && ".join(lines)


def _each(before: str, *words: str) -> list[str]:
    return [part for word in words for part in (before, word)]


def _line(program: str, command: Sequence[str]) -> str:
    """A command for a shell; the variable `program` stands for its first word."""
    return f'"${program}" {shlex.join(command[1:])}'


def ninja_program() -> str:
    """The ninja of the `ninja` wheel, else the one on PATH. BuildError when there is none."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        program = Path(ninja.BIN_DIR) / "ninja"
        if program.is_file():
            return str(program)
    found = shutil.which("ninja")
    if found is None:
        raise BuildError("no ninja was found; `pip install ninja`")
    return found


def run(
    folder: Path,
    programs: Mapping[str, str],
    jobs: int | None,
    made: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Runs ninja in `folder`; returns the compilers' warnings.

    `made` gets the name of each object once it is there, so that a build which is killed keeps what it has made;
    `progress` each step's number and their total. BuildError begins with the compiler's own message when a step fails.
    """
    command = [ninja_program(), "-C", str(folder), *(["-j", str(jobs)] if jobs else [])]
    message: list[str] = []
    failed: list[str] = []
    ended = ""  # the step of the last line; the next line says whether it failed
    try:
        # A compiler may quote bytes that are not text.
        started = subprocess.Popen(
            command,
            env={**os.environ, **programs},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"ninja cannot be run: {error}") from error
    with started as ninja:
        assert ninja.stdout is not None
        lines = (line.rstrip("\n") for line in ninja.stdout)
        try:
            for line in lines:
                step = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
                if line.startswith("FAILED: "):
                    failed.append(line.split()[-1])
                    ended = ""
                    next(lines, None)  # the command
                elif step:
                    if ended:
                        made(ended)
                    ended = step[3]
                    if progress:
                        progress(int(step[1]), int(step[2]))
                elif not re.match(r"ninja: (Entering|build stopped|no work)", line):
                    message.append(line)
            if ended:
                made(ended)
        except BaseException:
            # ninja would go on writing after the lock of the folder is released.
            ninja.terminate()
            ninja.wait()
            raise
    if ninja.returncode == 0:
        return "\n".join(message)
    what = f"building {', '.join(failed)} failed" if failed else "ninja failed"
    raise BuildError("\n".join([*message, f"{what} in {folder}"]))


def dependencies(depfile: Path, csrc: Path) -> tuple[str, ...]:
    """Files under `csrc` named in a compiler's depfile, relative to it, sorted."""
    text = depfile.read_text(encoding="utf-8").replace("\\\n", " ").partition(": ")[2]
    paths = [re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:\\.|\S)+", text)]
    found = set()
    for path in paths:
        full = (depfile.parent.parent / path).resolve()
        if full.is_relative_to(csrc.resolve()):
            found.add(full.relative_to(csrc.resolve()).as_posix())
    return tuple(sorted(found))
