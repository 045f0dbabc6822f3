"""Breaks a kernel one instruction at a time and looks at what the emulator says and what the numbers are."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mla_suite.emulator import AssemblyError, Emulator, Memory, Report, Schedule

KINDS = {
    "barrier": r"s_barrier",
    "wait": r"s_waitcnt",
    "write-back": r"buffer_wbl2",
    "invalidate": r"buffer_inv",
    "atomic": r"(global|flat|buffer)_atomic_",
    "store": r"(global|flat|buffer)_store_|ds_write",
}
ORDERS = ("forward", "reverse", "shuffle:1")


class Launch(NamedTuple):
    """A launch that can be done again; `owners` keeps alive what `memory` has the addresses of, and `contents` is what
    was there."""

    machine: Emulator
    text: str
    kernel: str
    grid: tuple[int, int, int]
    block: int
    dynamic_lds: int
    params: bytes
    memory: Sequence[Memory]
    owners: Sequence[object]
    contents: Sequence[bytes]

    def run(self, text: str, order: str) -> tuple[Report, tuple[bytes, ...]]:
        """Report and the bytes of every buffer that may be written, from the same contents each time."""
        program = self.machine.load_text(text, self.kernel)
        for memory, data in zip(self.memory, self.contents, strict=True):
            ctypes.memmove(memory.address, data, span(memory))
        how = Schedule(threads=1, order=order, spin_limit=512, instruction_limit=200_000)
        report = self.machine.launch(program, self.grid, self.block, self.dynamic_lds, self.params, self.memory, how)
        return report, tuple(contents([memory for memory in self.memory if memory.access != "r"]))


def contents(memory: Sequence[Memory]) -> list[bytes]:
    return [ctypes.string_at(m.address, span(m)) for m in memory]


def span(memory: Memory) -> int:
    pairs = zip(memory.shape, memory.strides, strict=True)
    return (1 + sum((size - 1) * step for size, step in pairs)) * memory.itemsize if 0 not in memory.shape else 0


def body(text: str, kernel: str) -> range:
    """The lines of a kernel's code."""
    lines = text.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"{kernel}:"))
    return range(begin, next(i for i in range(begin, len(lines)) if lines[i].startswith(".Lfunc_end")))


def instruction(line: str) -> str:
    return line.split(";", 1)[0].split("//", 1)[0].strip()


@dataclass
class Mutation:
    kind: str
    line: int
    removed: str
    kinds: frozenset[str]  # kinds of the findings
    changed: bool

    @property
    def outcome(self) -> str:
        return "reported" if self.kinds else "missed" if self.changed else "without effect"


def deletions(text: str, kernel: str, kind: str) -> Iterator[tuple[int, str]]:
    """(line, text without it)."""
    lines = text.split("\n")
    for i in body(text, kernel):
        if re.match(KINDS[kind], instruction(lines[i])):
            yield i, "\n".join(lines[:i] + lines[i + 1 :])


def mutate(
    launch: Launch, kinds: Sequence[str] = tuple(KINDS), most: Callable[[str], int] | None = None
) -> list[Mutation]:
    """Deletes every instruction of these kinds that is executed, one at a time.

    At most `most(kind)` of them, spread over the kernel.
    """
    lines = launch.text.split("\n")
    right = {order: launch.run(launch.text, order) for order in ORDERS}
    for order, (report, _) in right.items():
        assert [str(f) for f in report.findings] == [], f"{launch.kernel} itself, order {order}"
    program = launch.machine.load_text(launch.text, launch.kernel)
    times = sum(report.times for report, _ in right.values())
    executed = {line.number - 1 for line, count in zip(program.lines, times, strict=True) if count}
    done = []
    for kind in kinds:
        found = [place for place in deletions(launch.text, launch.kernel, kind) if place[0] in executed]
        limit = most(kind) if most else len(found)
        chosen = found if len(found) <= limit else [found[i * len(found) // limit] for i in range(limit)]
        for line, text in chosen:
            seen: set[str] = set()
            changed = False
            for order in ORDERS:
                try:
                    report, written = launch.run(text, order)
                except AssemblyError as error:  # a text that makes no sense without the line is noticed as well
                    seen.add(f"refused: {error}")
                    break
                seen |= {finding.kind for finding in report.findings}
                changed |= written != right[order][1]
                if seen:
                    break
            done.append(Mutation(kind, line, instruction(lines[line]), frozenset(seen), changed))
    return done


def why_redundant(text: str, kernel: str, line: int) -> str | None:
    """The reason why a wait can go without effect, read off every path that leaves it; None if there is none.

    What a wait asks for is asked for again before the program ends on each of these paths, or the program ends, where
    the hardware waits itself. In between nothing may use what is in flight, and that is what the emulator looks for.
    """
    lines = [instruction(x) for x in text.split("\n")]
    code = body(text, kernel)
    labels = {lines[i][:-1]: i for i in code if lines[i].endswith(":")}
    reasons: set[str] = set()
    seen: set[tuple[int, frozenset[tuple[str, int]]]] = set()
    ways = [(line + 1, frozenset(wait_counts(lines[line]).items()))]
    while ways:
        at, wanted = ways.pop()
        if (at, wanted) in seen:
            continue
        seen.add((at, wanted))
        now = lines[at]
        if now.startswith("s_waitcnt"):
            counts = wait_counts(now)
            wanted = frozenset((name, value) for name, value in wanted if counts.get(name, 1 << 9) > value)
            if not wanted:
                reasons.add("asked for again")
                continue
        if now.startswith("s_endpgm"):
            reasons.add("the program ends")
            continue
        branch = re.match(r"s_(c?)branch\S*\s+(\S+)", now)
        if branch:
            ways.append((labels[branch[2]], wanted))
        if not (branch and not branch[1]):
            if at + 1 >= code.stop:
                return None
            ways.append((at + 1, wanted))
    return " or ".join(sorted(reasons)) or None


def wait_counts(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(vmcnt|lgkmcnt)\((\d+)\)", text)}


def table(title: str, done: Sequence[Mutation]) -> str:
    rows = [title]
    for kind in KINDS:
        mine = [m for m in done if m.kind == kind]
        if mine:
            counts = {o: sum(m.outcome == o for m in mine) for o in ("reported", "without effect", "missed")}
            rows.append(f"  {kind:12}{len(mine):4} deleted  " + "  ".join(f"{v} {o}" for o, v in counts.items()))
    return "\n".join(rows)
