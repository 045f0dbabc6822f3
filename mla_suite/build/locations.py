"""Folders of code objects: where they are, who may write there and how files are written; the errors of the build."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

from mla_suite.archs import CSRC

PACKAGE_OBJECTS = CSRC.parent / "objects"
MANIFEST = "manifest.json"
TUNED = "-tuned"
_MAX_TEXT_BYTES = 64 << 20  # no more is unpacked from one file; a kernel's longest text has 3 MB


class BuildError(RuntimeError):
    """A code object could not be made; the text begins with the compiler's own message, if there is one."""


class ObjectError(RuntimeError):
    """A built object or its manifest may not be used: absent, altered, stale, or writable by others."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_hashes(csrc: Path = CSRC) -> dict[str, str]:
    """sha256 of every file under `csrc`, by its name relative to it."""
    files = (path for path in csrc.rglob("*") if path.is_file())
    return {path.relative_to(csrc).as_posix(): sha256(path.read_bytes()) for path in files}


def hash_sources(csrc: Path, sources: Sequence[str], hashes: Mapping[str, str] | None = None) -> str:
    """sha256 over names and contents of these files of `csrc`; a file that is gone changes it too.

    hashes  those of `file_hashes` at another time, instead of now
    """
    if hashes is None:
        hashes = {name: sha256((csrc / name).read_bytes()) for name in sources if (csrc / name).is_file()}
    return sha256("\n".join(f"{name} {hashes.get(name, 'absent')}" for name in sources).encode())


def tree_hash(csrc: Path = CSRC) -> str:
    """sha256 over the names and contents of every file under `csrc`."""
    return sha256("\n".join(map(" ".join, sorted(file_hashes(csrc).items()))).encode())


def cache_root() -> Path | None:
    """`$XDG_CACHE_HOME/mla_suite`, or None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification has relative values ignored; expanduser leaves an unknown home as "~".
    base = named if os.path.isabs(named) else os.path.expanduser("~/.cache")
    return Path(base) / "mla_suite" if os.path.isabs(base) else None


def cached_objects(csrc: Path = CSRC, suffix: str = "") -> Path | None:
    """This user's own build of these very sources, `<cache root>/<hash of the sources>`, or None if there is none.

    With the suffix TUNED, the folder of kernels that were built for tuned rows.
    """
    root = cache_root()
    # os.path.exists is False, not an error, for a home that this user may not enter.
    if root is None or not os.path.exists(root) or not any(root.glob(f"*{suffix}")):
        return None
    folder = root / (tree_hash(csrc) + suffix)
    return folder if os.path.exists(folder / MANIFEST) else None


def writable_objects(csrc: Path = CSRC, package: Path = PACKAGE_OBJECTS) -> Path:
    """The package's object folder where it can be written, else the cache's `private_folder`."""
    nearest = package
    while not nearest.exists():
        nearest = nearest.parent
    # access() is true for root on a read-only mount only up to the mount itself, which it does report.
    if os.access(nearest, os.W_OK):
        return package
    return private_folder(tree_hash(csrc), f"{package} cannot be written")


def private_folder(name: str, why: str) -> Path:
    """The folder of that name in this user's cache, made with mode 0700; `why` it is needed begins the errors.

    BuildError when it could be written by others.
    """
    root = cache_root()
    if root is None:
        raise BuildError(f"{why} and this user has no home; set XDG_CACHE_HOME to a private folder")
    folder = root / name
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for part in (root, folder):
            part.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{why}, nor can the cache be written ({error}); set XDG_CACHE_HOME") from error
    problem = writable_by_others(folder, parents=True)
    if problem:
        raise BuildError(f"the cache {problem}; make it private (chmod go-w) or set XDG_CACHE_HOME to a private folder")
    return folder


def writable_by_others(path: Path, *, parents: bool) -> str | None:
    """A clause that says who else may write `path` (and its parents, if asked), or None when only its owner may.

    Without parents, write access of a group we are in is accepted: a umask of 002 gives it to every installed file. A
    sticky folder such as /tmp is accepted as a parent, since others cannot replace what is in it.
    """
    for place in [path, *path.resolve().parents] if parents else [path]:
        info = place.stat()
        sticky = place != path and bool(info.st_mode & stat.S_ISVTX)
        problem = _other_writers(info, own_group=not parents, sticky=sticky)
        if problem:
            return f"{place} {problem}"
    return None


def _other_writers(info: os.stat_result, *, own_group: bool, sticky: bool = False) -> str | None:
    """A clause on who else may write a file of this status. Trusted: this user, root, who owns this package's code."""
    package = Path(__file__).stat()
    if info.st_uid not in {os.geteuid(), 0, package.st_uid}:
        return f"belongs to user {info.st_uid}"
    group = info.st_mode & stat.S_IWGRP and not (own_group and info.st_gid in {os.getegid(), 0, package.st_gid})
    if (group or info.st_mode & stat.S_IWOTH) and not sticky:
        return f"may be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def read_trusted(path: Path, expected_sha256: str | None = None) -> bytes:
    """The bytes of an object file. ObjectError when it is absent, writable by others, or not what was built."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            problem = _other_writers(os.fstat(file.fileno()), own_group=True)
            if problem:
                raise ObjectError(f"{path} {problem}; make it private, then run `python -m mla_suite build`")
            data = file.read()
    except OSError as error:
        raise ObjectError(f"{path} cannot be read ({error.strerror}); run `python -m mla_suite build`") from error
    if expected_sha256 is not None:
        _need_hash(path, data, expected_sha256)
    return data


def read_trusted_text(path: Path, expected_sha256: str) -> str:
    """The text that `write_text` put at `path`, by its own hash. ObjectError as for `read_trusted`."""
    packed = read_trusted(path)
    try:
        unpacker = zlib.decompressobj(wbits=31)
        data = unpacker.decompress(packed, _MAX_TEXT_BYTES)
        whole = unpacker.eof
    except zlib.error:
        whole = False
    if not whole:
        raise ObjectError(
            f"{path} is not a whole gzip file; it was altered or truncated: run `python -m mla_suite build`"
        )
    _need_hash(path, data, expected_sha256)
    return data.decode()


def _need_hash(path: Path, data: bytes, expected: str) -> None:
    if sha256(data) != expected:
        raise ObjectError(
            f"{path} has sha256 {sha256(data)[:12]}..., its manifest says {expected[:12]}...; "
            "it was altered or half replaced: run `python -m mla_suite build`"
        )


def write_text(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, compressed by gzip to a sixteenth of its size, unless the file already holds it."""
    try:
        read_trusted_text(path, sha256(data))
    except ObjectError:
        write_atomically(path, gzip.compress(data, 9, mtime=0))


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` to `path` so that a reader or a crash sees the old file or the whole new one."""
    if path.is_file() and not path.is_symlink() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_abandoned(paths: Set[Path]) -> None:
    """Removes what a killed process left beside `paths` when it wrote one of them; only while no other writes there."""
    for folder in {path.parent for path in paths}:
        for file in folder.glob(".*"):
            name, _, process = file.name[1:].rpartition(".")
            if process.isdecimal() and folder / name in paths:
                file.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's build lock: a second builder waits for the first, and says so on stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build in {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
