"""How sm_90's kernels load what the kernel ahead of them may write.

With programmatic dependent launch a kernel begins while that one still runs. `__ldg` is `ld.global.nc`, which reads
only what does not change while the kernel runs, and ptxas has moved such a load above `griddepcontrol.wait`: no source
has one. In machine code, where ACQBULK is that wait, no load is of constant data, and one that some path reaches before
the wait bypasses L1.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from built import require_built

from mla_suite.archs import CSRC
from mla_suite.build import manifest
from mla_suite.build.instances import instances

LOAD, WAIT = re.compile(r"LDG\.\S+"), "ACQBULK"
TARGET = re.compile(r"`\((\.L_\w+)\)")
BY_NAME = {item.id: item.kernel for item in instances("sm_90")}
FIRSTS = {kernel: name for name, kernel in reversed(BY_NAME.items())}.values()
"""One instance of each kernel."""
EVERY_THREAD_WAITS = ("append_kv", "combine", "persistent_combine", "plan", "sparse_decode", "swap_ab_sparse_decode")
"""In decode one role waits, and hands the others what they load. The resident and the streaming combine load
cu_seqlens_q through L1 before they wait: it is older than decode, whose threads were behind their own wait when they
let combine start, and an SM's L1 keeps nothing from one kernel to the next."""
CUBINS = [pytest.param(name, marks=[] if name in FIRSTS else [pytest.mark.full]) for name in BY_NAME]


def test_no_source_loads_constant_data():
    sources = [path for folder in ("sm_90", "common") for path in (CSRC / folder).rglob("*.[hc][pu]*")]
    assert len(sources) > 50
    found = [path.name for path in sources if re.search(r"__ldg\(|__ldcg|ld\.global\.\S*nc\b|__restrict__", code(path))]
    assert found == []


def code(path: Path) -> str:
    """A source without its comments."""
    return re.sub(r"//[^\n]*", "", path.read_text())


def unordered_loads(listing: Iterable[str]) -> tuple[list[str], list[str]]:
    """Loads of constant data in nvdisasm's listing; and those through L1 that some path reaches without the wait.

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
    strange = [text for text in code if re.search(r"\b(BRX|JMX|JMP|RTT)\b", text)]
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
        if not re.match(r"(BRA `|EXIT|RET)", code[at]):
            ways.append(at + 1)
    early = [code[at] for at in sorted(seen) if LOAD.search(code[at]) and ".STRONG." not in code[at]]
    return [text for text in code if LOAD.search(text) and ".CONSTANT" in text], early


def disassembled(cubin: Path) -> list[str]:
    backends = pytest.importorskip("triton.backends.nvidia", reason="triton brings nvdisasm, and is not installed")
    program = Path(backends.__path__[0]) / "bin" / "nvdisasm"
    if not program.exists():
        pytest.skip("this build of triton has no nvdisasm")
    return subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("instance", CUBINS)
def test_what_comes_before_the_wait_bypasses_l1(instance):
    require_built("sm_90", instance)
    objects = manifest.locate()
    assert isinstance(objects, Path), objects
    constant, early = unordered_loads(disassembled(objects / "sm_90" / f"{instance}.cubin"))
    assert constant == []
    if BY_NAME[instance] in EVERY_THREAD_WAITS:
        assert early == []


LISTING = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   ACQBULK ;
.L_x_0:
        /*0030*/                   {}LDG.E R3, desc[UR4][R2.64] ;
        /*0040*/                   EXIT ;
"""


def test_a_way_around_the_wait_is_found():
    assert unordered_loads(LISTING.format("").splitlines()) == ([], ["LDG.E R3, desc[UR4][R2.64]"])
    straight = LISTING.replace("@!P0 BRA `(.L_x_0)", "NOP")
    assert unordered_loads(straight.format("@P1 ").splitlines()) == ([], [])
    constant = straight.replace("LDG.E", "LDG.E.CONSTANT").format("")
    assert unordered_loads(constant.splitlines()) == (["LDG.E.CONSTANT R3, desc[UR4][R2.64]"], [])
    early = straight.replace("S2R R0, SR_TID.X", "LDG.E.64 R8, desc[UR4][R2.64]")
    assert unordered_loads(early.format("").splitlines()) == ([], ["LDG.E.64 R8, desc[UR4][R2.64]"])
    strong = straight.replace("S2R R0, SR_TID.X", "LDG.E.STRONG.GPU R8, desc[UR4][R2.64]")
    assert unordered_loads(strong.format("").splitlines()) == ([], [])
    with pytest.raises(AssertionError, match="does not follow 'BRX R4'"):
        unordered_loads(["        /*0000*/                   BRX R4 ;"])
