"""The comparison of machine code notices code, constants and registers, and nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import compare_machine_code
import pytest

from mla_suite.build import BuildError


def elf(code: bytes, name: str = ".text.kernel", registers: int = 32, other: bytes = b"/a/path") -> bytes:
    """An ELF file with one code section, one section of debug information, and a table of names."""
    names = b"\0" + name.encode() + b"\0.debug_line\0.shstrtab\0"
    bodies = [b"", code, other, names]
    starts = [0, 1, names.index(b".debug_line"), names.index(b".shstrtab")]
    offset, headers = 64, b""
    for i, body in enumerate(bodies):
        info = registers << 24 | 7 if i == 1 else 0
        headers += struct.pack("<IIQQQQIIQQ", starts[i], min(i, 1), 0, 0, offset, len(body), 0, info, 1, 0)
        offset += len(body)
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", offset)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(bodies), 3)
    return header + b"".join(bodies) + headers


def folder(at: Path, **files: bytes) -> str:
    (at / "sm_90").mkdir(parents=True)
    for name, data in files.items():
        (at / "sm_90" / f"{name}.cubin").write_bytes(data)
    return str(at)


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (elf(b"12345678"), False),
        (elf(b"12345678", name=".text.another_name"), False),
        (elf(b"12345678", other=b"/another/path/and/lines"), False),
        (elf(b"12345679"), True),
        (elf(b"123456789"), True),
        (elf(b"12345678", registers=40), True),
        (elf(b"12345678", name=".nv.constant0.kernel"), True),
    ],
)
def test_what_counts_as_a_difference(tmp_path, capsys, after, changed):
    old, new = folder(tmp_path / "old", decode=elf(b"12345678")), folder(tmp_path / "new", decode=after)
    assert compare_machine_code.main([old, new]) == int(changed)
    assert ("sm_90/decode" in capsys.readouterr().out) is changed


def test_objects_without_a_counterpart_differ_unless_renamed(tmp_path, capsys):
    old, new = folder(tmp_path / "old", before=elf(b"1")), folder(tmp_path / "new", after=elf(b"1"))
    assert compare_machine_code.main([old, new]) == 1
    printed = capsys.readouterr().out
    assert "sm_90/before: only in the old folder" in printed
    assert "sm_90/after: only in the new folder" in printed
    assert compare_machine_code.main([old, new, "--renamed", "before=after"]) == 0


def test_what_cannot_be_compared_is_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    full = folder(tmp_path / "full", decode=b"no object")
    with pytest.raises(SystemExit):
        compare_machine_code.main([str(empty), full])
    with pytest.raises(BuildError, match="not a 64-bit"):
        compare_machine_code.main([full, full])
