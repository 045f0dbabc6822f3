"""build.ninja: writes the commands that make objects from instances, and runs them.

The commands name their programs by environment variables. So a compiler that lies in another folder, as that of each
isolated build of pip does, compiles nothing again while it is the same program.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mla_suite.build import params
from mla_suite.build.compilers import AmdCompiler, NvidiaCompiler
from mla_suite.build.instances import Instance
from mla_suite.build.locations import BuildError, sha256

CLANG, LLD, NVCC = "MLA_SUITE_CLANG", "MLA_SUITE_LLD", "MLA_SUITE_NVCC"


def write_if_changed(path: Path, text: str) -> None:
    """Leaves a file with this text and its time stamp alone, so that nothing is rebuilt for it."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_plan(
    folder: Path,
    csrc: Path,
    instances: Sequence[Instance],
    amd: AmdCompiler | None,
    nvidia: NvidiaCompiler | None,
) -> None:
    """Writes `folder/build.ninja` and the generated headers with the layout asserts of the parameter structs.

    The compilers' versions and programs are inputs of every object: another compiler rebuilds. `folder` and `csrc` are
    absolute.
    """
    lines = ["ninja_required_version = 1.5"]
    if amd is not None:
        write_if_changed(folder / "amd.compiler", _identity(amd.version, amd.clang[0]))
    if nvidia is not None:
        write_if_changed(folder / "nvidia.compiler", _identity(nvidia.version, nvidia.nvcc))
    for item in instances:
        checks = folder / "params" / f"{item.params}.hpp"
        try:
            text = params.load(item.params, csrc).static_asserts()
        except (FileNotFoundError, ValueError) as error:
            raise BuildError(f"{item.arch.name} {item.id}: {error}") from error
        write_if_changed(checks, "#pragma once\n" + text)
        defines = [f"-D{key}={value}" for key, value in item.constants.items()]
        defines += [f"-DMLA_SUITE_KERNEL={item.symbol}", f"-I{csrc}", "-include", str(checks)]
        source = str(csrc / item.source)
        stem = f"{item.arch.name}/{item.id}"
        if item.arch.vendor == "amd":
            assert amd is not None
            compile_command = [
                *amd.to_assembly(item.arch.name),
                # The text names its sources relative to csrc: the same bytes from any directory.
                f"-ffile-prefix-map={csrc}=csrc",
                f"-ffile-prefix-map={folder}=generated",
                *defines,
                # -MD of a device-only HIP compile writes nothing in some clang builds; the front end's own flag does.
                *_each("-Xclang", "-dependency-file", f"{stem}.d", "-MT", f"{stem}.s"),
                *("-S", source, "-o", f"{stem}.s"),
            ]
            assemble = [*amd.to_relocatable(item.arch.name), f"{stem}.s", "-o", f"{stem}.o"]
            link = [*amd.to_object(), f"{stem}.o", "-o", f"{stem}.hsaco"]
            inputs = [str(checks), "amd.compiler"]
            lines += _edge(f"{stem}.s", [source], inputs, CLANG, compile_command, f"{stem}.d")
            lines += _edge(f"{stem}.o", [f"{stem}.s"], ["amd.compiler"], CLANG, assemble)
            lines += _edge(f"{stem}.hsaco", [f"{stem}.o"], ["amd.compiler"], LLD, link)
        else:
            assert nvidia is not None
            command = [*nvidia.to_object(item.arch.name), *defines, "-MD", "-MF", f"{stem}.d", "-MT", f"{stem}.cubin"]
            command += [source, "-o", f"{stem}.cubin"]
            inputs = [str(checks), "nvidia.compiler"]
            lines += _edge(f"{stem}.cubin", [source], inputs, NVCC, command, f"{stem}.d", f"{stem}.log")
    write_if_changed(folder / "build.ninja", "\n".join(lines) + "\n")


def _identity(version: str, program: str) -> str:
    return f"{version}\n{sha256(Path(program).read_bytes())}\n"


def programs(amd: AmdCompiler | None, nvidia: NvidiaCompiler | None) -> dict[str, str]:
    """The environment variables that stand for the programs in the commands of `write_plan`."""
    found = {} if amd is None else {CLANG: amd.clang[0], LLD: amd.lld[0]}
    return found if nvidia is None else found | {NVCC: nvidia.nvcc}


def _each(before: str, *words: str) -> list[str]:
    return [part for word in words for part in (before, word)]


def _edge(
    output: str,
    inputs: list[str],
    implicit: list[str],
    program: str,
    command: list[str],
    depfile: str = "",
    log: str = "",
) -> list[str]:
    """A rule of its own and the one build line that uses it. With `log`, output is kept there and shown on failure.

    The log is an output too: ninja builds again when it is missing. `program` names the variable that stands for the
    command's first word.
    """
    rule = re.sub(r"\W", "_", output)
    text = f'"${program}" {shlex.join(command[1:])}'
    if log:
        kept = shlex.quote(log)
        text = f"{text} > {kept} 2>&1 || {{ cat {kept}; rm -f {kept}; exit 1; }}; grep -i -A 3 warning {kept} || true"
    lines = [f"rule {rule}", f"  command = {text.replace('$', '$$')}", f"  description = {output}"]
    if depfile:
        lines.append(f"  depfile = {depfile}")
    outputs = f"{_paths([output])} | {_paths([log])}" if log else _paths([output])
    lines.append(f"build {outputs}: {rule} {_paths(inputs)} | {_paths(implicit)}")
    return lines


def _paths(paths: list[str]) -> str:
    return " ".join(re.sub(r"([$ :])", r"$\1", path) for path in paths)


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
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Runs ninja in `folder`; returns the compilers' warnings. `progress` gets each step's number and their total.

    BuildError begins with the compiler's own message when a step fails.
    """
    command = [ninja_program(), "-C", str(folder), *(["-j", str(jobs)] if jobs else [])]
    message: list[str] = []
    failed: list[str] = []
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
                step = re.match(r"\[(\d+)/(\d+)\] ", line)
                if line.startswith("FAILED: "):
                    failed.append(line.split()[-1])
                    next(lines, None)  # the command
                elif step:
                    if progress:
                        progress(int(step[1]), int(step[2]))
                elif not re.match(r"ninja: (Entering|build stopped|no work)", line):
                    message.append(line)
        except BaseException:
            # ninja would go on writing after the folder's lock is released; on SIGTERM it removes half-made outputs.
            ninja.terminate()
            ninja.wait()
            raise
    if ninja.returncode == 0:
        return "\n".join(message)
    what = f"building {', '.join(failed)} failed" if failed else "ninja failed"
    raise BuildError("\n".join([*message, f"{what} in {folder}"]))


def drop_outdated(folder: Path, csrc: Path, instances: Sequence[Instance], hashes: Mapping[str, str]) -> None:
    """Removes what was compiled from other inputs than those of now, so that ninja compiles it again.

    ninja compares times, and an edit need not be newer than an object: a copy may keep an older time, and a file system
    may count whole seconds. `hashes` has the sources of now.
    """
    for item in instances:
        output, note = _first_output(folder, item), folder / item.arch.name / f"{item.id}.inputs"
        if output.is_file() and note.is_file() and note.read_text() != _inputs(folder, csrc, item, hashes):
            output.unlink()


def note_inputs(folder: Path, csrc: Path, instances: Sequence[Instance], hashes: Mapping[str, str]) -> None:
    """Writes beside each object that is there what it was compiled from, for `drop_outdated` of the next build."""
    for item in instances:
        if _first_output(folder, item).is_file():
            note = folder / item.arch.name / f"{item.id}.inputs"
            write_if_changed(note, _inputs(folder, csrc, item, hashes))


def _first_output(folder: Path, item: Instance) -> Path:
    """Returns what a compiler makes of the source; the rest is made of it."""
    return folder / item.arch.name / f"{item.id}{'.s' if item.arch.vendor == 'amd' else '.cubin'}"


def _inputs(folder: Path, csrc: Path, item: Instance, hashes: Mapping[str, str]) -> str:
    depfile = folder / item.arch.name / f"{item.id}.d"
    sources = dependencies(depfile, csrc) if depfile.is_file() else ()
    made = [folder / "params" / f"{item.params}.hpp", folder / f"{item.arch.vendor}.compiler"]
    lines = [f"{name} {hashes.get(name, 'absent')}" for name in sources]
    return "\n".join([*lines, *(f"{path.name} {sha256(path.read_bytes())}" for path in made), ""])


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


def keep_dependencies(depfile: Path, csrc: Path, sources: Sequence[str]) -> None:
    """Leaves these files under `csrc` in a depfile, not the compiler's own headers, which may move with it."""
    target = depfile.read_text(encoding="utf-8").partition(":")[0].strip()
    paths = (re.sub(r"([\\ ])", r"\\\1", str(csrc / source)) for source in sources)
    write_if_changed(depfile, f"{target}: {' '.join(paths)}\n")
