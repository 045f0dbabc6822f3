"""Copies to LDS are assembly, so no compiler adds wait states for them: what copy.hpp promises, in all that ships."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from mla_suite.build import manifest

AFTER_M0 = 1  # wait states between a write of M0 and the copy that reads it
AFTER_VECTOR = 5  # between a scalar register's write by a vector instruction and a memory instruction that reads it
ADDRESS = re.compile(r"\bs\[(\d+):(\d+)\]")
WRITTEN = re.compile(r"v_\S+ (?:s(\d+)\b|s\[(\d+):(\d+)\]|(m0)\b)")


def instructions(text: str) -> Iterator[str]:
    for line in text.splitlines():
        code = line.split(";")[0].strip()
        if code and not code.startswith(".") and not code.endswith(":"):
            yield code


def hazards(text: str) -> tuple[int, list[str]]:
    """How many copies to LDS there are, and those that come too soon."""
    states = 0  # issued so far
    last_m0 = -AFTER_M0
    by_vector: dict[str, int] = {}  # scalar register -> when a vector instruction wrote it last
    copies, wrong = 0, []
    for code in instructions(text):
        if "_load_lds_" in code:
            copies += 1
            pairs = (range(int(first), int(last) + 1) for first, last in ADDRESS.findall(code))
            read = ["m0", *(f"s{number}" for numbers in pairs for number in numbers)]
            late = [name for name in read if states - by_vector.get(name, -AFTER_VECTOR) < AFTER_VECTOR]
            if late or states - last_m0 < AFTER_M0:
                wrong.append(f"{code}: {', '.join(late) or 'm0'} was just written")
        states += int(code.split()[1], 0) + 1 if code.startswith("s_nop") else 1
        if re.match(r"s_\S+ m0,", code):
            last_m0 = states
        if found := WRITTEN.match(code):
            single, first, last, m0 = found.groups()
            numbers = range(int(single or first or 0), int(single or last or -1) + 1)
            by_vector |= dict.fromkeys(["m0"] if m0 else [f"s{number}" for number in numbers], states)
    return copies, wrong


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_copies_wait_for_what_they_read(arch):
    kernels = [entry for (name, _), entry in manifest.installed().kernels.items() if name == arch]
    if not kernels:
        pytest.skip(f"no kernels for {arch}; run `python -m mla_suite build --arch {arch}`")
    copies = 0
    for entry in kernels:
        number, wrong = hazards(entry.read_text())
        assert not wrong, f"{entry.id}: {wrong}"
        copies += number
    assert copies > 1000


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ("s_mov_b32 m0, s4", 1),
        ("s_mov_b32 m0, s4\ns_nop 0", 0),
        ("v_readlane_b32 s6, v1, 3\ns_nop 3", 1),
        ("v_readlane_b32 s7, v1, 3\ns_nop 3\nv_mov_b32_e32 v1, 0", 0),
        ("v_readlane_b32 s8, v1, 3", 0),
        ("v_cmp_eq_u32_e64 s[6:7], v1, v2\ns_nop 3", 1),
        ("v_readfirstlane_b32 m0, v1\ns_nop 0", 1),
    ],
)
def test_copies_too_soon_are_found(before, wrong):
    copies, found = hazards(f"{before}\nglobal_load_lds_dword v0, s[6:7] offset:4\n")
    assert (copies, len(found)) == (1, wrong)
