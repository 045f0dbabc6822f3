"""A small csrc tree of its own: one kernel, two sizes, every arch. Tests of build and launch build and break it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mla_suite.archs import CSRC

KERNEL = """\
#include "common/params/scale.hpp"

MLA_KERNEL(THREADS, 2) void MLA_SUITE_KERNEL(mla::ScaleParams p) {
  MLA_SHARED float staged[THREADS];
  for (int64_t base = int64_t(mla::block_id_x()) * THREADS; base < p.count; base += p.stride) {
    const int64_t at = base + mla::thread_id();
    staged[mla::thread_id()] = at < p.count ? p.in[at] : 0.0f;
    mla::block_sync();
    if (at < p.count) p.out[at] = p.scale * staged[mla::thread_id() ^ 1];
    mla::block_sync();
  }
}
"""
PARAMS = """\
#pragma once
#include "common/device.hpp"

namespace mla {
struct ScaleParams {
  const float* in;  // [count]
  float* out;       // [count]
  float scale;
  int64_t count;
  int64_t stride;   // elements from one turn of a workgroup to its next
};
}  // namespace mla
"""
DECLARED = """
[kernels.scale]
source = "scale.hip"
instances = [{ THREADS = [64, 256] }]
budget = { registers = 64, lds = 1024 }
"""
IDS = ("scale_threads-64", "scale_threads-256")


def make(root: Path) -> Path:
    """Writes the tree under `root` and returns it."""
    for arch in ("gfx942", "gfx950", "sm_90"):
        folder = root / arch
        folder.mkdir(parents=True)
        text = (CSRC / arch / "arch.toml").read_text().split("[kernels.")[0]
        amd = arch.startswith("gfx")
        declared = DECLARED if amd else DECLARED.replace(".hip", ".cu")
        (folder / "arch.toml").write_text(text + declared)
        (folder / ("scale.hip" if amd else "scale.cu")).write_text(KERNEL)
    (root / "common" / "params").mkdir(parents=True)
    shutil.copy(CSRC / "common" / "device.hpp", root / "common" / "device.hpp")
    (root / "common" / "params" / "scale.hpp").write_text(PARAMS)
    return root


def edit(path: Path, pattern: str, replacement: str) -> None:
    """Replaces the one place in a file that `pattern` matches."""
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count == 1, f"{pattern!r} matches {count} places in {path}"
    path.write_text(text)


def shell(path: Path, text: str) -> Path:
    """An executable at `path` that runs the text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def outputs(out: Path) -> dict[Path, bytes]:
    """Returns what a build wrote, and not when: two writes within one tick of a file system's clock have one time."""
    return {path: path.read_bytes() for path in out.rglob("*") if path.suffix in (".s", ".o", ".hsaco", ".gz")}
