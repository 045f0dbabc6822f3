"""Program flow, waits, cache control and hardware registers: SOPP and SOPK, "Program Flow Control"; "Data dependency
resolution" for the counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from isa_case import ALL, Case, Custom, anything, in_registers, register, words

from mla_suite.emulator import State

U = np.uint32


def untouched(rng: np.random.Generator, op: str, *texts: str) -> Iterable[Case]:
    """Instructions that change neither registers nor the flow."""
    x = words(rng, 64)

    def check(state: State) -> None:
        np.testing.assert_array_equal(state.v[1], x)
        assert state.s[5] == 77

    yield Case([*texts, "v_mov_b32_e32 v1, v0", "s_mov_b32 s5, 77"], check, {0: x})


register(
    Custom("s_nop", untouched, "s_nop 0", "s_nop 7"),
    Custom("s_setprio", untouched, "s_setprio 3"),
    Custom("s_icache_inv", untouched, "s_icache_inv"),
    Custom("s_dcache_inv", untouched, "s_dcache_inv"),
    Custom("s_dcache_wb", untouched, "s_dcache_wb"),
    Custom("s_sleep", untouched, "s_sleep 2"),
    Custom("s_barrier", untouched, "s_barrier"),
    Custom("buffer_wbl2", untouched, "buffer_wbl2 sc1", "s_waitcnt vmcnt(0)"),
    Custom("buffer_inv", untouched, "buffer_inv sc1"),
)


def ends(rng: np.random.Generator, op: str) -> Iterable[Case]:
    def check(state: State) -> None:
        assert state.s[4:6].tolist() == [1, 0]

    yield Case(["s_mov_b32 s4, 1", "s_endpgm", "s_mov_b32 s5, 1"], check)


register(Custom("s_endpgm", ends))


def branch(rng: np.random.Generator, op: str, taken_if: Callable[[bool, bool, bool], bool]) -> Iterable[Case]:
    """Each of SCC, VCC and EXEC zero or not; backward branches too."""
    for scc in (False, True):
        for vcc in (0, 1 << 50):
            for execs in (0, 1 << 33):
                taken = taken_if(scc, vcc != 0, execs != 0)

                def check(state: State, taken=taken) -> None:
                    assert state.s[4] == (1 if taken else 3)

                lines = ["s_mov_b32 s4, 1", f"{op} .Lend", "s_mov_b32 s4, 3", ".Lend:"]
                yield Case(lines, check, {}, {"vcc": vcc}, exec_mask=execs, scc=scc)

    def check_loop(state: State) -> None:
        assert state.s[4] == 5

    if op == "s_cbranch_scc1":
        lines = ["s_mov_b32 s4, 0", ".Ltop:", "s_add_u32 s4, s4, 1", "s_cmp_lt_u32 s4, 5", "s_cbranch_scc1 .Ltop"]
        yield Case(lines, check_loop)


for op, taken_if in {
    "s_branch": lambda scc, vcc, execs: True,
    "s_cbranch_scc0": lambda scc, vcc, execs: not scc,
    "s_cbranch_scc1": lambda scc, vcc, execs: scc,
    "s_cbranch_vccz": lambda scc, vcc, execs: not vcc,
    "s_cbranch_vccnz": lambda scc, vcc, execs: vcc,
    "s_cbranch_execz": lambda scc, vcc, execs: not execs,
    "s_cbranch_execnz": lambda scc, vcc, execs: execs,
}.items():
    register(Custom(op, branch, taken_if))


def counters(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """A value is readable once as few of the later operations are outstanding as its wait allows; before, its use is
    reported. vmcnt counts vector memory, lgkmcnt LDS and scalar memory; the latter returns out of order."""
    data = words(rng, 256)
    memory = [("data", data, "r")]
    base = {"s2": data.ctypes.data}
    lanes = np.arange(64, dtype=U) * 4
    loads = [f"global_load_dword v{4 + i}, v0, s[2:3] offset:{256 * i}" for i in range(3)]

    first = in_registers(20, data[:64], "the first")
    use = "v_mov_b32_e32 v20, v4"
    early = frozenset({"register_before_wait"})
    for wait, findings in (
        ("s_waitcnt vmcnt(2)", frozenset()),
        ("s_waitcnt vmcnt(0)", frozenset()),
        ("s_waitcnt vmcnt(3)", early),
        ("s_waitcnt lgkmcnt(0)", early),
        ("s_nop 0", early),
        ("s_waitcnt 0x0f70", frozenset()),  # the same as vmcnt(0)
        ("s_waitcnt vmcnt(3) lgkmcnt(0)", early),
    ):
        check = anything if findings else first
        yield Case([*loads, wait, use], check, {0: lanes}, base, memory=memory, findings=findings)
    # Writing a register that a load still owes is as wrong as reading it.
    overwrite = [loads[0], "v_mov_b32_e32 v4, 0"]
    yield Case(overwrite, anything, {0: lanes}, base, memory=memory, findings=early)
    lds = data[:64].view(np.uint8)
    reads = ["ds_read_b32 v4, v0", "ds_read_b32 v5, v0"]
    for wait, findings in (
        ("s_waitcnt lgkmcnt(1)", frozenset()),
        ("s_waitcnt lgkmcnt(2)", early),
        ("s_waitcnt vmcnt(0)", early),
    ):
        check = anything if findings else first
        yield Case([*reads, wait, use], check, {0: lanes}, lds=lds, findings=findings)
    mixed = ["ds_read_b32 v4, v0", "s_load_dword s8, s[2:3], 0x0"]
    for wait, findings in (("s_waitcnt lgkmcnt(1)", early), ("s_waitcnt lgkmcnt(0)", frozenset())):
        yield Case([*mixed, wait, use], anything, {0: lanes}, base, lds=lds, memory=memory, findings=findings)
    scalar = ["s_load_dword s8, s[2:3], 0x0", "s_waitcnt vmcnt(0)", "s_mov_b32 s9, s8"]
    yield Case(scalar, anything, {}, base, memory=memory, findings=early)
    # A load into a register that the same counter owes returns after the other, unless scalar loads are under way.
    twice = ["ds_read_b32 v4, v0"] * 2
    done = ["s_load_dword s8, s[2:3], 0x0", "ds_read_b32 v5, v0", "s_waitcnt lgkmcnt(0)"]
    for lines, findings in (
        (twice, frozenset()),
        ([*done, *twice], frozenset()),
        ([done[0], *twice], early),
        ([loads[0], loads[0]], frozenset()),
        ([loads[0], twice[0]], early),
    ):
        yield Case([*lines, "s_waitcnt vmcnt(0) lgkmcnt(0)"], anything, {0: lanes}, base, lds=lds, memory=memory,
                   findings=findings)  # fmt: skip
    # Copies to LDS arrive in the order of their issue, whether each is waited for or all at once.
    values = ["ds_read_b32 v10, v0", "ds_read_b32 v11, v0 offset:256", "ds_read_b32 v12, v0 offset:512"]
    copies = ["s_mov_b32 m0, 0", "s_nop 0", *(f"global_load_lds_dword v0, s[2:3] offset:{256 * i}" for i in range(3))]
    copied = in_registers(10, data[:192].reshape(3, 64), "copied")
    each = [line for i, read in enumerate(values) for line in (f"s_waitcnt vmcnt({2 - i})", read)]
    late = ["s_waitcnt vmcnt(1)", values[2], "s_waitcnt vmcnt(0)"]
    for lines, check, findings in (
        (each, copied, frozenset()),
        (["s_waitcnt vmcnt(0)", *values], copied, frozenset()),
        (late, anything, frozenset({"lds_in_flight"})),
    ):
        yield Case([*copies, *lines, "s_waitcnt lgkmcnt(0)"], check, {0: lanes}, base, lds=words(rng, 192),
                   memory=memory, findings=findings)  # fmt: skip
    # A counter that is full stalls: of 64 loads the first has returned before the last is issued.
    many = [f"global_load_dword v{4 if i == 0 else 30 + i}, v0, s[2:3]" for i in range(64)]
    yield Case([*many, use], anything, {0: lanes}, base, memory=memory)
    yield Case([*many[:63], use], anything, {0: lanes}, base, memory=memory, findings=early)


register(Custom("s_waitcnt", counters))


def clocks(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """Two readings: the later is not smaller."""

    def check(state: State) -> None:
        assert state.s64(6) >= state.s64(4)

    lines = [f"{op} s[4:5]", "s_waitcnt lgkmcnt(0)", "s_nop 3", f"{op} s[6:7]", "s_waitcnt lgkmcnt(0)"]
    yield Case(lines, check)

    # An LDS access behind it may return first, so that one outstanding says nothing about the clock.
    behind = ["ds_read_b32 v4, v0", "s_waitcnt lgkmcnt(1)"]
    for later in ([], behind):
        lines = [f"{op} s[4:5]", *later, "s_mov_b32 s6, s4"]
        yield Case(lines, anything, {0: 0}, lds=words(rng, 64), findings=frozenset({"register_before_wait"}))


register(Custom("s_memtime", clocks), Custom("s_memrealtime", clocks))


def mode_register(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """MODE: rounding in 3:0, denormals in 7:4. Fields are read and written by offset and size."""

    def check(state: State) -> None:
        assert state.s[4:8].tolist() == [0xF, 0x3, 0x50, 0x0]

    lines = [
        "s_getreg_b32 s4, hwreg(HW_REG_MODE, 4, 4)",
        "s_getreg_b32 s5, hwreg(HW_REG_MODE, 6, 2)",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 5, 1), 0",
        "s_setreg_b32 hwreg(HW_REG_MODE, 7, 1), s9",
        "s_getreg_b32 s6, hwreg(HW_REG_MODE)",
        "s_getreg_b32 s7, hwreg(HW_REG_MODE, 0, 4)",
    ]
    yield Case(lines, check, {}, {"s9": 0}, exec_mask=ALL)


for op in ("s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32"):
    register(Custom(op, mode_register))


def program_counter(rng: np.random.Generator, op: str) -> Iterable[Case]:
    """The address of the next instruction, to which compilers add distances to constants: the emulator makes these
    distances addresses, so it is 0 there."""

    def check(state: State) -> None:
        assert state.s64(4) == 0

    yield Case(["s_getpc_b64 s[4:5]"], check, {}, {"s4": 9, "s5": 9})


register(Custom("s_getpc_b64", program_counter))
