"""The build: declared instances -> ninja -> objects checked (budgets, wait states) -> object folder with a manifest."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from mla_suite import archs as arch_records
from mla_suite.archs import CSRC
from mla_suite.build import budget, compilers, emulator_library, locations, manifest, ninja_plan, params, report
from mla_suite.build.instances import Instance, instances
from mla_suite.build.locations import BuildError, ObjectError
from mla_suite.build.manifest import KernelEntry, Library, Manifest
from mla_suite.errors import UsageError

NO_NVCC = "no nvcc of CUDA 12 or newer serves here; `pip install nvidia-cuda-nvcc` or name one with --nvcc or CUDA_HOME"


def build(
    archs: Sequence[str] | None = None,
    *,
    csrc: Path = CSRC,
    out: Path | None = None,
    rocm: Path | None = None,
    nvcc: Path | None = None,
    jobs: int | None = None,
    kernels: Sequence[str] | None = None,
    emulator: bool = True,
    fp16: bool = True,
    debug: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Builds the code objects of `archs` (default: all that a compiler is found for) and returns the manifest.

    `out` is the object folder (default: the package's, or the user's cache when that cannot be written), in which no
    file is removed but those of an earlier build; `rocm` and `nvcc` name the AMD and the NVIDIA compiler (see
    `compilers`). `kernels` limits the build to these; objects of other archs and kernels stay, those of an arch without
    a compiler while they are up to date. `emulator` builds the host library too where its sources are present. Without
    `fp16` there are no kernels for fp16 caches, which Triton serves instead. With `debug` the waits of NVIDIA kernels
    end in a trap (`NvidiaCompiler`), and their budgets are not checked. Compilers' warnings, what is left
    out, and that the emulator takes longer than the kernels, go to stderr. `progress` is called with the number of each
    finished compiler step and their total. Two processes may build at once.

    BuildError: a compiler's own message, a missing compiler, every broken budget with both numbers, missing wait
    states, or a folder that cannot be written or holds something else; nothing is published then. UsageError: an
    unknown arch or kernel, or debug without one that it is for. ValueError: a declaration in `arch.toml` that cannot be
    built.
    """
    csrc = csrc.resolve()
    arch_records.get.cache_clear()  # sources may have been edited since they were last read
    params.load.cache_clear()
    known = arch_records.names(csrc)
    for name in archs or ():
        if name not in known:
            raise UsageError(f"unknown arch {name!r}: this tree has {', '.join(known) or 'none'}")
    out = (out or locations.writable_objects(csrc)).absolute()
    with _written(out):
        _need_own_folder(out, csrc)
    wanted = [item for name in (archs or known) for item in instances(name, csrc)]
    if kernels is not None:
        missing = sorted(set(kernels) - {item.kernel for item in wanted})
        if missing:
            raise UsageError(f"unknown kernels {missing}: possible are {sorted({item.kernel for item in wanted})}")
        wanted = [item for item in wanted if item.kernel in kernels]
    if not fp16:
        wanted = [item for item in wanted if item.constants.get("DTYPE") != "fp16"]
    for_nvidia = _archs_of("nvidia", wanted)
    nvidia = compilers.find_nvidia(nvcc) if for_nvidia or nvcc is not None else None  # a path that is given is right
    if debug and not for_nvidia:
        raise UsageError(
            "debug is for NVIDIA kernels, as no other kernel waits in a loop; name sm_90 or leave debug out"
        )
    if debug and nvidia is not None:
        nvidia = nvidia.for_debugging()
    if for_nvidia and nvidia is None:
        left_out = ", ".join(for_nvidia)
        if archs is not None:
            raise BuildError(f"{NO_NVCC}, or leave {left_out} out")
        print(f"{left_out} is left out: {NO_NVCC}; everything else works without it", file=sys.stderr)
        wanted = [item for item in wanted if item.arch.vendor != "nvidia"]
    for_amd = _archs_of("amd", wanted)
    amd = compilers.find_amd(rocm, for_amd) if for_amd or rocm is not None else None
    complete = archs is None and kernels is None
    replaced = {(item.arch.name, item.kernel) for item in wanted}
    elsewhere = set(known) - {item.arch.name for item in wanted}

    def stays(old: KernelEntry) -> bool:
        """Whether a kernel that is not built now remains; after a complete build only those without a compiler."""
        other = (old.arch, old.kernel) not in replaced
        return other and (not complete or (old.arch in elsewhere and not old.stale))

    site = _Site(csrc, out, out / ".build", amd, nvidia)
    emulator = emulator and (csrc / "emulator").is_dir()
    omitted = emulator_library.missing() if emulator else None
    if omitted:
        print(f"the emulator is left out: {omitted}; everything else works without it", file=sys.stderr)
    with _written(out), locations.locked(out), ThreadPoolExecutor(1) as beside:
        libraries = {}
        if emulator and not omitted:  # one compiler after the other, for half a minute: beside ninja's
            libraries["emulator"] = beside.submit(
                emulator_library.build_library, site.work / "emulator", csrc / "emulator"
            )
        made = _compiled(wanted, site, jobs, progress)
        if any(not library.done() for library in libraries.values()):
            print("compiling the emulator", file=sys.stderr)
        done = {name: library.result() for name, library in libraries.items()}
        return _publish(made, done, site, stays, accept_damaged=complete)


def build_tuned(wanted: Sequence[Instance], progress: Callable[[int, int], None] | None = None) -> int:
    """Builds what is missing of `wanted` into this user's cache, beside the package's objects; returns how many.

    Tuning tries more instances than a package ships, and a user's tables may name them. BuildError as for `build`.
    """
    csrc = CSRC.resolve()
    missing = [item for item in wanted if item.id not in manifest.built(item.arch.name)]
    if not missing:
        return 0
    for_amd, for_nvidia = _archs_of("amd", missing), _archs_of("nvidia", missing)
    amd = compilers.find_amd(None, for_amd) if for_amd else None
    nvidia = compilers.find_nvidia() if for_nvidia else None
    if for_nvidia and nvidia is None:
        raise BuildError(NO_NVCC)
    name = locations.tree_hash(csrc) + locations.TUNED
    out = locations.private_folder(name, "objects for tuned rows are kept in the user's cache")
    site = _Site(csrc, out, out / ".build", amd, nvidia)
    with _written(out), locations.locked(out):
        made = _compiled(missing, site, None, progress)
        _publish(made, {}, site, lambda old: not old.stale, accept_damaged=True)
    return len(missing)


def _archs_of(vendor: str, items: Sequence[Instance]) -> list[str]:
    return sorted({item.arch.name for item in items if item.arch.vendor == vendor})


class _Site(NamedTuple):
    """Where a build reads sources, publishes objects and does its work, and its compilers."""

    csrc: Path
    out: Path
    work: Path
    amd: compilers.AmdCompiler | None
    nvidia: compilers.NvidiaCompiler | None


def _compiled(
    wanted: Sequence[Instance], site: _Site, jobs: int | None, progress: Callable[[int, int], None] | None
) -> list[tuple[KernelEntry, list[str]]]:
    """Runs ninja; the manifest entry of each instance, with a sentence for each budget it breaks."""
    hashes = locations.file_hashes(site.csrc)  # of before: what is edited while it is compiled is stale at once
    plan = ninja_plan.Plan(site.work, site.csrc, hashes, site.amd, site.nvidia)
    outdated = [item for item in wanted if not plan.is_current(item)]
    if outdated:
        said = plan.make(outdated, jobs, progress)
        if said:
            print(said, file=sys.stderr)
    return [_entry(item, site, plan) for item in wanted]


@contextmanager
def _written(out: Path) -> Iterator[None]:
    """Turns an OSError about the object folder into a BuildError that names the folder."""
    try:
        yield
    except OSError as error:
        place = out if error.filename is None else Path(os.fsdecode(error.filename))
        if not (place.is_relative_to(out) or out.is_relative_to(place)):
            raise
        why = error.strerror or error
        raise BuildError(
            f"{out} cannot be written ({why}); make room there or name another folder with --out"
        ) from error


def _need_own_folder(out: Path, csrc: Path) -> None:
    """BuildError for a folder of sources, and for one with an arch's folder that is no build's."""
    place = out.resolve()
    if place.is_relative_to(csrc) or arch_records.names(place):
        raise BuildError(f"{out} holds sources; name another folder with --out")
    foreign = [name for name in arch_records.names(csrc) if (out / name).exists()]
    if foreign and not any((out / name).exists() for name in (locations.MANIFEST, ".build")):
        raise BuildError(f"{out} holds {', '.join(foreign)}, but no build made it; name another folder with --out")


def _entry(item: Instance, site: _Site, plan: ninja_plan.Plan) -> tuple[KernelEntry, list[str]]:
    """The manifest entry of one built instance, and a sentence for each budget it breaks."""
    csrc, out, work, amd, nvidia = site
    stem = work / item.arch.name / item.id
    is_amd = item.arch.vendor == "amd"
    object_path = stem.with_name(item.id + (".hsaco" if is_amd else ".cubin"))
    data = object_path.read_bytes()
    if is_amd:
        text = stem.with_name(item.id + ".s").read_bytes()
        cost = report.read_assembly(text.decode(), item.symbol)
    else:
        text = b""
        cost = report.read_cubin(data, stem.with_name(item.id + ".log").read_text(), item.symbol)
    mirror = params.load(item.params, csrc)
    debug = nvidia is not None and nvidia.debug and not is_amd
    broken = [] if debug else budget.broken(item, cost)
    if cost.params != mirror.size:
        broken.append(f"{item.arch.name} {item.id}: takes {cost.params} bytes, but {mirror.name} has {mirror.size}")
    if cost.threads == 0:
        broken.append(f"{item.arch.name} {item.id}: has no launch bound; declare the entry with MLA_KERNEL")
    sources = plan.note(item).sources()
    compiler = amd if is_amd else nvidia
    assert compiler is not None
    entry = KernelEntry(
        id=item.id,
        arch=item.arch.name,
        kernel=item.kernel,
        symbol=item.symbol,
        constants=dict(item.constants),
        source=item.source,
        sources=sources,
        source_hash=locations.hash_sources(csrc, sources, plan.hashes),
        compiler=compiler.version,
        object=f"{item.arch.name}/{object_path.name}",
        object_sha256=locations.sha256(data),
        text=f"{item.arch.name}/{item.id}.s.gz" if is_amd else "",
        text_sha256=locations.sha256(text) if is_amd else "",
        params=item.params,
        params_size=mirror.size,
        dynamic_lds=item.dynamic_lds,
        occupancy=budget.occupancy(item, cost),
        tokens=item.tokens,
        root=out,
        csrc=csrc,
        **{figure.name: getattr(cost, figure.name) for figure in fields(report.Cost)},
    )
    return entry, broken


def _publish(
    made: Sequence[tuple[KernelEntry, list[str]]],
    libraries: dict[str, Path],
    site: _Site,
    stays: Callable[[KernelEntry], bool],
    *,
    accept_damaged: bool,
) -> Manifest:
    """Copies the objects, writes the manifest, then removes files that the manifest before named and this one does not.

    stays           whether an entry of the manifest before, which is not made now, remains
    accept_damaged  start anew where that manifest cannot be read
    """
    csrc, out, work, *_ = site
    broken = [sentence for _, sentences in made for sentence in sentences]
    if broken:
        raise BuildError("\n".join(broken))
    before = _before(out, csrc, accept_damaged)
    kept = {key: old for key, old in before.kernels.items() if stays(old)}
    entries = kept | {(entry.arch, entry.id): entry for entry, _ in made}
    named = dict(before.libraries)
    for entry, _ in made:
        locations.write_atomically(out / entry.object, (work / entry.object).read_bytes())
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # zlib compresses without Python's lock
        texts = [entry.text for entry, _ in made if entry.text]
        list(
            pool.map(
                lambda name: locations.write_text(out / name, (work / name.removesuffix(".gz")).read_bytes()), texts
            )
        )
    for name, path in libraries.items():
        data = path.read_bytes()
        file = f"{name}/{path.name}"
        locations.write_atomically(out / file, data)
        named[name] = Library(file, locations.sha256(data))
    result = Manifest(out, entries, named)
    locations.write_atomically(out / locations.MANIFEST, result.to_json().encode())
    old, new = set(before.files()), set(result.files())
    for name in old - new:
        (out / name).unlink(missing_ok=True)
    locations.remove_abandoned({out / name for name in old | new})
    manifest.forget()
    return result


def _before(out: Path, csrc: Path, accept_damaged: bool) -> Manifest:
    """The folder's manifest before this build."""
    path = out / locations.MANIFEST
    try:
        return manifest.read(out, csrc) if path.exists() else Manifest(out, {}, {})
    except ObjectError:
        if not accept_damaged:
            raise
        if path.is_dir():
            path.rmdir()  # an error where it holds anything
        return Manifest(out, {}, {})
