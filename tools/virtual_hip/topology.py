"""A machine with one AMD GPU as the Linux kernel driver describes it: the folder of small files that ROCr reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mla_suite.archs import ArchSpec

MEMORY_BYTES = 64 << 30
"""GPU memory that is promised; pages exist once they are written."""

_GPU = 1 << 31 | 1 << 12  # where the numbers of a GPU's SIMDs begin
_SDMA_ENGINES = 2  # with none, ROCr copies by kernels of its own, which are not in the manifest


def write(arch: ArchSpec, folder: Path) -> Path:
    """A machine with one CPU node and one GPU of `arch`, in the kernel's format; returns `folder`."""
    _text(folder / "generation_id", "1\n")
    _table(folder / "system_properties", {"platform_oem": 0, "platform_id": 0, "platform_rev": 0})
    _node(folder / "nodes" / "0", "", 0, {"cpu_cores_count": 2, "mem_banks_count": 1, "io_links_count": 1})
    _bank(folder / "nodes" / "0", heap=0, size=16 << 30, width=64, clock=2400)
    _node(folder / "nodes" / "1", arch.name, 2, _gpu(arch))
    _bank(folder / "nodes" / "1", heap=1, size=MEMORY_BYTES, width=8192, clock=1300)
    for node, other in ((0, 1), (1, 0)):
        link = dict(type=2, node_from=node, node_to=other, weight=20, flags=1)
        zeros = ("version_major", "version_minor", "min_latency", "max_latency", "min_bandwidth", "max_bandwidth")
        path = folder / "nodes" / str(node) / "io_links" / "0" / "properties"
        _table(path, {**link, **dict.fromkeys((*zeros, "recommended_transfer_size"), 0)})
    for index, (level, kilobytes) in enumerate(((1, 32), (2, 4096))):
        cache = dict(processor_id_low=_GPU, level=level, size=kilobytes, cache_line_size=128, cache_lines_per_tag=1)
        cache.update(association=16, latency=0, type=9, sibling_map=1)
        _table(folder / "nodes" / "1" / "caches" / str(index) / "properties", cache)
    return folder


def target_version(arch: str) -> int:
    """The driver's number of a gfx name: major, minor and stepping (a hexadecimal digit) with two digits each."""
    digits = re.fullmatch(r"gfx(\d+)(\d)([0-9a-f])", arch)
    if digits is None:
        raise ValueError(f"{arch} is not the name of an AMD GPU")
    return int(digits[1]) * 10000 + int(digits[2]) * 100 + int(digits[3], 16)


def _gpu(arch: ArchSpec) -> Mapping[str, int]:
    return {
        "simd_count": arch.compute_units * arch.simds,
        "mem_banks_count": 1,
        "caches_count": 2,
        "io_links_count": 1,
        "simd_id_base": _GPU,
        "max_waves_per_simd": arch.max_waves_per_simd,
        "lds_size_in_kb": arch.lds_bytes >> 10,
        "num_gws": 64,
        "wave_front_size": arch.wavefront,
        "array_count": 32,
        "simd_arrays_per_engine": 1,
        "cu_per_simd_array": -(-arch.compute_units // 32),
        "simd_per_cu": arch.simds,
        "max_slots_scratch_cu": 32,
        "gfx_target_version": target_version(arch.name),
        "vendor_id": 0x1002,
        "device_id": 0x74A1,
        "location_id": 0x500,
        "drm_render_minor": 128,
        "num_sdma_engines": _SDMA_ENGINES,
        "num_sdma_queues_per_engine": 8,
        "num_cp_queues": 24,
        "max_engine_clk_fcompute": arch.clock_mhz,
        "capability": 0x2000,  # doorbells of 64 bits; no debugger
        "unique_id": 1,
        "num_xcc": 1,
    }


_PROPERTIES = (
    *("cpu_cores_count", "simd_count", "mem_banks_count", "caches_count", "io_links_count", "p2p_links_count"),
    *("cpu_core_id_base", "simd_id_base", "max_waves_per_simd", "lds_size_in_kb", "gds_size_in_kb", "num_gws"),
    *("wave_front_size", "array_count", "simd_arrays_per_engine", "cu_per_simd_array", "simd_per_cu"),
    *("max_slots_scratch_cu", "gfx_target_version", "vendor_id", "device_id", "location_id", "domain"),
    *("drm_render_minor", "hive_id", "num_sdma_engines", "num_sdma_xgmi_engines", "num_sdma_queues_per_engine"),
    *("num_cp_queues", "local_mem_size", "fw_version", "capability", "debug_prop", "sdma_fw_version", "unique_id"),
    *("num_xcc", "max_engine_clk_fcompute", "max_engine_clk_ccompute"),
)
_EVERY_NODE = {"fw_version": 167, "sdma_fw_version": 22, "max_engine_clk_ccompute": 2000}


def _node(folder: Path, name: str, gpu_id: int, own: Mapping[str, int]) -> None:
    _text(folder / "gpu_id", f"{gpu_id}\n")
    _text(folder / "name", f"{name}\n")
    _table(folder / "properties", {**dict.fromkeys(_PROPERTIES, 0), **_EVERY_NODE, **own})


def _bank(node: Path, heap: int, size: int, width: int, clock: int) -> None:
    bank = {"heap_type": heap, "size_in_bytes": size, "flags": 0, "width": width, "mem_clk_max": clock}
    _table(node / "mem_banks" / "0" / "properties", bank)


def _table(path: Path, values: Mapping[str, int]) -> None:
    _text(path, "".join(f"{name} {value}\n" for name, value in values.items()))


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
