"""Machine code of sm_90's sparse decode: no load of constant data may come before the wait for the previous kernel.

`__ldg` is `ld.global.nc`: it reads data that is taken not to change while the kernel runs, and ptxas has moved such a
load above `griddepcontrol.wait`. The previous kernel may be the one that writes the plan, so on every path from the
entry to an LDG.CONSTANT there must be an ACQBULK, which is that wait.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from built import require_built

from mla_suite.build import manifest
from mla_suite.build.instances import instances

CUBINS = [item.id for item in instances("sm_90") if item.kernel.endswith("sparse_decode")]
WAIT, CONSTANT = "ACQBULK", re.compile(r"LDG\.\S*CONSTANT")
TARGET = re.compile(r"`\((\.L_\w+)\)")


def early_constant_loads(listing: Iterable[str]) -> tuple[int, list[str]]:
    """How many constant loads nvdisasm's listing has, and those that some path reaches without the wait.

    Paths are taken to be more than they are: what names a label may jump there, and all but an unconditional branch or
    exit may go on.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing:
        label = re.match(r"(\.L_\w+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append(instruction[1])
    strange = [text for text in code if re.search(r"\b(BRX|JMX|JMP|CALL|RET|RTT)\b", text)]
    assert not strange, f"this test does not follow {strange[0]!r}"
    seen: set[int] = set()
    ways = [0]
    while ways:
        at = ways.pop()
        if at in seen or at >= len(code):
            continue
        seen.add(at)
        if WAIT in code[at]:
            continue
        ways += [labels[name] for name in TARGET.findall(code[at])]
        if not re.match(r"(BRA `|EXIT)", code[at]):
            ways.append(at + 1)
    loads = [at for at, text in enumerate(code) if CONSTANT.search(text)]
    return len(loads), [code[at] for at in loads if at in seen]


def disassembled(cubin: Path) -> list[str]:
    backends = pytest.importorskip("triton.backends.nvidia", reason="triton brings nvdisasm, and is not installed")
    program = Path(backends.__path__[0]) / "bin" / "nvdisasm"
    if not program.exists():
        pytest.skip("this build of triton has no nvdisasm")
    return subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("instance", CUBINS)
def test_no_constant_load_comes_before_the_wait(instance):
    require_built("sm_90", instance)
    objects = manifest.locate()
    assert isinstance(objects, Path), objects
    loads, early = early_constant_loads(disassembled(objects / "sm_90" / f"{instance}.cubin"))
    assert loads > 0, "the tile scheduler reads a plan by __ldg no longer: this test has nothing to check"
    assert early == []


LISTING = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   ACQBULK ;
.L_x_0:
        /*0030*/                   {}LDG.E.CONSTANT R3, desc[UR4][R2.64] ;
        /*0040*/                   EXIT ;
"""


def test_a_way_around_the_wait_is_found():
    assert early_constant_loads(LISTING.format("").splitlines()) == (1, ["LDG.E.CONSTANT R3, desc[UR4][R2.64]"])
    straight = LISTING.replace("@!P0 BRA `(.L_x_0)", "NOP")
    assert early_constant_loads(straight.format("").splitlines()) == (1, [])
    assert early_constant_loads(straight.format("@P1 ").splitlines()) == (1, [])
    hoisted = straight.replace("S2R R0, SR_TID.X", "LDG.E.64.CONSTANT R8, desc[UR4][R2.64]")
    assert early_constant_loads(hoisted.format("").splitlines())[1] == ["LDG.E.64.CONSTANT R8, desc[UR4][R2.64]"]
    with pytest.raises(AssertionError, match="does not follow 'BRX R4'"):
        early_constant_loads(["        /*0000*/                   BRX R4 ;"])
