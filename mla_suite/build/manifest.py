"""The manifest: each kernel's compiler, sources and cost, and the hashes that guard every load."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from mla_suite.archs import CSRC
from mla_suite.build import locations
from mla_suite.build.locations import MANIFEST, ObjectError, hash_sources, read_trusted
from mla_suite.build.report import Cost, Loop

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class KernelEntry(Cost):
    """One kernel in the manifest, with its cost.

    File names are relative to the object folder `root`; `text` is the assembly of an AMD object, compressed by gzip and
    empty for a cubin, and `text_sha256` the hash of what it unpacks to. `dynamic_lds` is the most
    dynamic LDS, in bytes; `occupancy` waves per SIMD; `sources` the files under csrc it was made from and `source_hash`
    the sha256 over them.
    """

    id: str
    arch: str
    kernel: str
    symbol: str
    constants: Mapping[str, int | str]
    source: str
    sources: tuple[str, ...]
    source_hash: str
    compiler: str
    object: str
    object_sha256: str
    text: str
    text_sha256: str
    params: str
    params_size: int
    dynamic_lds: int
    occupancy: int
    tokens: int
    root: Path = field(compare=False)
    csrc: Path = field(compare=False)

    def read_object(self) -> bytes:
        """The code object's bytes, checked against the manifest. ObjectError says what to do when they may not run."""
        self._check_sources()
        return read_trusted(self.root / self.object, self.object_sha256)

    def read_text(self) -> str:
        """The assembly the object was made from, checked likewise. ObjectError for a kernel without one."""
        if not self.text:
            raise ObjectError(f"{self.arch} {self.id} has no assembly text; only AMD kernels ship theirs")
        self._check_sources()
        return locations.read_trusted_text(self.root / self.text, self.text_sha256)

    @property
    def stale(self) -> bool:
        """True if the sources on disk differ from those it was built from; False where there are none."""
        return self.csrc.is_dir() and hash_sources(self.csrc, self.sources) != self.source_hash

    def _check_sources(self) -> None:
        if self.stale:
            raise ObjectError(
                f"{self.arch} {self.id} was built from other sources than {self.csrc} now holds; "
                "run `python -m mla_suite build`"
            )


@dataclass(frozen=True)
class Library:
    """A host library beside the kernels: file relative to the object folder, and its sha256."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything built into one object folder."""

    root: Path
    kernels: Mapping[tuple[str, str], KernelEntry]
    libraries: Mapping[str, Library]

    def find(self, arch: str, instance_id: str) -> KernelEntry:
        """The kernel's entry. ObjectError names what is there when it is not."""
        entry = self.kernels.get((arch, instance_id))
        if entry is None:
            archs = sorted({name for name, _ in self.kernels})
            siblings = [key for name, key in self.kernels if name == arch]
            have = f"{len(siblings)} kernels for {arch}" if siblings else f"objects for {', '.join(archs) or 'no arch'}"
            raise ObjectError(
                f"no code object {instance_id} for {arch} in {self.root} (it holds {have}); "
                f"run `python -m mla_suite build --arch {arch}`"
            )
        return entry

    def library(self, name: str) -> Path:
        """Path of a host library, its bytes checked. ObjectError when it was not built."""
        made = self.libraries.get(name)
        if made is None:
            raise ObjectError(f"no {name} library in {self.root}; run `python -m mla_suite build`")
        read_trusted(self.root / made.file, made.sha256)
        return self.root / made.file

    def only_archs(self, archs: Collection[str]) -> Manifest:
        """This manifest without the kernels of other archs."""
        return replace(self, kernels={key: entry for key, entry in self.kernels.items() if entry.arch in archs})

    def files(self) -> list[str]:
        """Every file that belongs to this manifest, itself included, relative to the object folder."""
        made = [name for entry in self.kernels.values() for name in (entry.object, entry.text) if name]
        return sorted([MANIFEST, *made, *(library.file for library in self.libraries.values())])

    def to_json(self) -> str:
        kernels = []
        for key in sorted(self.kernels):
            row = asdict(self.kernels[key])
            del row["root"], row["csrc"]
            kernels.append(row)
        libraries = {name: asdict(made) for name, made in sorted(self.libraries.items())}
        return json.dumps({"schema": SCHEMA, "libraries": libraries, "kernels": kernels}, indent=1) + "\n"


def parse(text: bytes, root: Path, csrc: Path = CSRC) -> Manifest:
    """The manifest in `text`, which is JSON in UTF-8. ObjectError when it is not one that this version wrote."""
    where = root / MANIFEST
    try:
        table = json.loads(text)
        if table["schema"] != SCHEMA:
            raise ObjectError(
                f"{where} has schema {table['schema']!r}, this version reads {SCHEMA}; run `python -m mla_suite build`"
            )
        kernels = {}
        for row in table["kernels"]:
            entry = _entry(row, root, csrc)
            kernels[entry.arch, entry.id] = entry
        libraries = {name: Library(**made) for name, made in table["libraries"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ObjectError(f"{where} is damaged ({error}); run `python -m mla_suite build`") from error
    for file in [f for e in kernels.values() for f in (e.object, e.text)] + [lib.file for lib in libraries.values()]:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ObjectError(f"{where} names {file}, outside its folder; run `python -m mla_suite build`")
    return Manifest(root, kernels, libraries)


_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "Loop | None": (dict, type(None))}


def _entry(row: dict[str, Any], root: Path, csrc: Path) -> KernelEntry:
    names = {item.name for item in fields(KernelEntry)} - {"root", "csrc"}
    if set(row) != names:
        raise ValueError(f"fields {sorted(set(row) ^ names)} are missing or unknown")
    for item in fields(KernelEntry):
        expected = _TYPES.get(str(item.type))
        if expected is not None and not isinstance(row[item.name], expected):
            raise ValueError(f"{item.name} is {row[item.name]!r}")
    row = {**row, "sources": tuple(row["sources"]), "loop": Loop(**row["loop"]) if row["loop"] else None}
    return KernelEntry(**row, root=root, csrc=csrc)


def read(root: Path, csrc: Path = CSRC) -> Manifest:
    """The manifest of one object folder. ObjectError when it is absent, damaged or writable by others."""
    if root.is_dir():
        problem = locations.writable_by_others(root, parents=False)
        if problem:
            raise ObjectError(f"{problem}; make it private (chmod go-w)")
    return parse(read_trusted(root / MANIFEST), root, csrc)


def locate(csrc: Path = CSRC, package: Path = locations.PACKAGE_OBJECTS) -> Path | str:
    """The folder whose objects are used: this user's cache if it was built for these very sources, else the package's.

    A sentence instead when neither was built. ObjectError when the cache may be written by others.
    """
    cache = locations.cached_objects(csrc)
    if cache is not None:
        _need_private(cache)
        return cache
    if not (package / MANIFEST).exists():
        return f"no code objects were built into {package}; run `python -m mla_suite build`"
    return package


def _need_private(cache: Path) -> None:
    problem = locations.writable_by_others(cache, parents=True)
    if problem:
        raise ObjectError(f"the cache {problem}; make it private (chmod go-w) or delete it")


def installed() -> Manifest:
    """The manifest that this process uses, read once (`forget()` after a build). ObjectError when nothing was built."""
    found = _found()
    if isinstance(found, str):
        raise ObjectError(found)
    return found


def installed_library(name: str) -> Path | None:
    """Path of a host library of that manifest, its bytes checked; None where it was not built."""
    found = _found()
    return None if isinstance(found, str) or name not in found.libraries else found.library(name)


@cache
def built(arch: str) -> frozenset[str]:
    """Ids of the kernels of an arch in the manifest this process uses; none when nothing was built."""
    found = _found()
    return frozenset() if isinstance(found, str) else frozenset([key for name, key in found.kernels if name == arch])


def forget() -> None:
    """Makes the next question read the manifest again."""
    _found.cache_clear()
    built.cache_clear()


@cache
def _found() -> Manifest | str:
    """The manifest, or the sentence that says why there is none."""
    root = locate()
    return root if isinstance(root, str) else _with_tuned(read(root))


def _with_tuned(built: Manifest) -> Manifest:
    """The manifest with the kernels that this user built for tuned rows; ObjectError when those may not be trusted."""
    folder = locations.cached_objects(suffix=locations.TUNED)
    if folder is None:
        return built
    _need_private(folder)
    try:
        tuned = read(folder)
    except ObjectError as error:
        raise ObjectError(f"{error}, or delete {folder}") from error
    return replace(built, kernels={**tuned.kernels, **built.kernels})
