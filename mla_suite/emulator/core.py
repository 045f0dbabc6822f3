"""The emulator's library through ctypes: the C structures, and what the library says about itself."""

from __future__ import annotations

import ctypes as c
from functools import cache
from pathlib import Path

from mla_suite.build import emulator_library, locations, manifest
from mla_suite.build.locations import BuildError, ObjectError
from mla_suite.launch.driver import DriverError

LANES = 64
VECTORS = 512
"""v0..v255, then a0..a255."""
SCALARS = 128
MAX_OPERANDS = 6
MAX_DIMENSIONS = 6
ARCHS = {"gfx942": 1, "gfx950": 2}
CLASSES = ("salu", "smem", "valu", "transcendental", "matrix", "lds", "global", "atomic", "control")


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    """Fields of a structure that have one type and follow each other."""
    return [(name, kind) for name in names]


class View(c.Structure):
    """One buffer of a launch as the core sees it."""

    _fields_ = [
        *_fields(c.c_uint64, "base", "span"),
        ("shift", c.c_int64),
        *_fields(c.c_int32, "access", "dimensions"),
        *_fields(c.c_int64 * MAX_DIMENSIONS, "size", "stride"),
        ("fetched", c.c_double),
    ]


class RawFinding(c.Structure):
    _fields_ = [
        *_fields(c.c_int32, "kind", "pc", "wave", "other"),
        *_fields(c.c_int64, "workgroup", "detail"),
        *_fields(c.c_uint64, "lanes", "address", "count"),
    ]


class PcCounts(c.Structure):
    _fields_ = _fields(c.c_uint64, "times", "lanes", "global_bytes", "lds_bytes", "lds_clocks_128", "lds_clocks_256")


class LaunchRequest(c.Structure):
    _fields_ = [
        ("program", c.c_void_p),
        *_fields(c.c_uint32 * 3, "grid", "block"),
        *_fields(c.c_uint32, "lds_bytes", "mode", "user_scalars", "ids", "scratch_bytes", "reverse_waves"),
        *_fields(c.c_uint32, "checks", "threads", "views", "findings"),
        *_fields(c.c_uint64, "spin_limit", "instruction_limit"),
        *_fields(c.c_void_p, "user_scalar", "order", "view", "finding", "counts", "loaded", "stored"),
        *_fields(c.c_void_p, "initial_vectors", "initial_scalars", "initial_lds"),
        *_fields(c.c_void_p, "final_vectors", "final_scalars", "final_lds"),
        *_fields(c.c_void_p, "model", "times"),
        ("models", c.c_uint32),
    ]


class TimeModel(c.Structure):
    """Constants of one compute unit, in clocks and bytes per clock; csrc/emulator/timeline.hpp explains them."""

    _fields_ = [
        *_fields(c.c_double, "issue", "vector_latency", "transcendental", "matrix_extra", "branch", "lds_latency"),
        *_fields(c.c_double, "lds_rate", "lds_direct", "memory_latency", "scalar_latency", "memory_rate"),
        *_fields(c.c_double, "chip_rate", "slowdown", "cache_rate", "barrier"),
        *_fields(c.c_uint32, "simds", "copies"),
    ]


class GroupTime(c.Structure):
    """What one workgroup took, and how many of these clocks each unit of its compute unit was busy."""

    _fields_ = _fields(c.c_double, "clocks", "matrix", "vector", "lds", "memory")


class Core:
    """The loaded library. `modifiers` and `findings` are its own names, in its own order."""

    def __init__(self, path: Path) -> None:
        try:
            library = c.CDLL(str(path))
        except OSError as error:
            raise DriverError(
                f"the emulator's library cannot be loaded ({error}); run `python -m mla_suite build`"
            ) from error
        for name, result, arguments in (
            ("emulator_sizes", c.c_uint32, [c.c_int]),
            ("emulator_modifier_name", c.c_char_p, [c.c_int]),
            ("emulator_finding_name", c.c_char_p, [c.c_int]),
            ("emulator_source_hash", c.c_char_p, []),
            ("emulator_opcode", c.c_int, [c.c_char_p]),
            ("emulator_opcode_name", c.c_char_p, [c.c_int]),
            ("emulator_opcode_class", c.c_int, [c.c_int]),
            ("emulator_opcode_arch", c.c_int, [c.c_int]),
            ("emulator_program", c.c_void_p, [c.c_void_p, c.c_int, c.c_int, c.POINTER(c.c_int), c.POINTER(c.c_char_p)]),
            ("emulator_program_free", None, [c.c_void_p]),
            ("emulator_passes", c.c_int, [c.c_void_p, c.c_int]),
            ("emulator_launch", None, [c.POINTER(LaunchRequest)]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.library = library
        self.path = path
        size = library.emulator_sizes
        self.modifiers = [library.emulator_modifier_name(i).decode() for i in range(size(2))]
        self.findings = [library.emulator_finding_name(i).decode() for i in range(size(9))]
        self.max_findings = size(8)
        self.record_words = 1 + 4 * MAX_OPERANDS + len(self.modifiers)
        mirrors = [(LaunchRequest, size(4)), (View, size(5)), (RawFinding, size(6)), (PcCounts, size(7))]
        mirrors += [(TimeModel, size(11)), (GroupTime, size(12))]
        wrong = [kind.__name__ for kind, there in mirrors if c.sizeof(kind) != there]
        if wrong or size(0) != 8 * self.record_words or size(3) != MAX_OPERANDS or size(10) != MAX_DIMENSIONS:
            raise DriverError(f"{path} was built for another version of mla_suite; run `python -m mla_suite build`")

    def opcodes(self, arch: str | None = None) -> list[str]:
        """Every instruction the table has, or those of one arch."""
        names, index = [], 0
        while (name := self.library.emulator_opcode_name(index)) is not None:
            if arch is None or self.library.emulator_opcode_arch(index) & ARCHS[arch]:
                names.append(name.decode())
            index += 1
        return names


def _made_from(path: Path) -> str:
    """The source hash a library was compiled with; '' if it is none of ours."""
    try:
        function = c.CDLL(str(path)).emulator_source_hash
    except (OSError, AttributeError):
        return ""
    function.restype = c.c_char_p
    return (function() or b"").decode()


@cache
def load() -> Core:
    """The library the build installed; where it was made from other sources, or never, one is built beside the objects.

    DriverError in one sentence when that is not possible either, or the installed one may not be used.
    """
    try:
        path = manifest.installed_library("emulator")
    except ObjectError as error:
        raise DriverError(str(error)) from error
    if path and (not emulator_library.SOURCES.is_dir() or _made_from(path) == emulator_library.source_hash()):
        return Core(path)
    try:
        return Core(emulator_library.build_library(locations.writable_objects() / ".build" / "emulator"))
    except BuildError as error:
        raise DriverError(str(error)) from error
    except OSError as error:
        raise DriverError(
            f"the emulator's library cannot be built ({error}); run `python -m mla_suite build`"
        ) from error
