"""Wait states that a program must leave by itself, checked on every path through its machine code.

An instruction is one wait state, `s_nop n` is n + 1, as LLVM counts them. The clocks that a matrix instruction keeps
its pipe busy are not counted, since the manuals do not promise them. The distance to each producer is carried forward
over branches and back-edges of loops, of several paths the shortest, until nothing changes.

A chain of products may move its accumulator, v[2:5] to v[0:3]. What then reads v[2:3] reads the later product's result:
the earlier one, which the hardware has forwarded to the later as its whole C, is no producer of these registers any
more. This is seen within a run of instructions without a branch, and counts for products of one opcode only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hazards.effects import Effect, Instruction, Operation, UnknownFlow, instructions
from hazards.table import ARCHS, BY_CLASSES, LONGEST, Rule


@dataclass(frozen=True)
class Finding:
    """A consumer `found` wait states behind a producer, where `rule` requires `required`; lines counted from 1."""

    arch: str
    rule: Rule
    producer: Instruction
    consumer: Instruction
    register: str
    required: int
    found: int

    def __str__(self) -> str:
        passes = self.producer.operation.passes
        which = f" ({passes} passes)" if passes else ""
        return (
            f"line {self.consumer.line}: `{self.consumer.operation.text}` comes {self.found} wait states behind line "
            f"{self.producer.line}: `{self.producer.operation.text}`{which}, {self.required} are required for "
            f"{self.register} ({self.rule.what}; {self.rule.source[self.arch]})"
        )


@dataclass(eq=False, slots=True)
class _Producer:
    """An effect of the instruction at `index`; compared by identity."""

    index: int
    effect: Effect
    operation: Operation


_State = dict[_Producer, int]
_CHAINED = BY_CLASSES["xdl", "xdl_c_same"]
_PRODUCERS = {producer for producer, _ in BY_CLASSES}
_PAIRS = {(producer, consumer.removesuffix("_same")) for producer, consumer in BY_CLASSES} | {("dot", "dot_c")}


def check(text: str, arch: str) -> list[Finding]:
    """Every wait state that `text` (assembly or a disassembler's listing) lacks on `arch`, in the order of its lines.

    ValueError: an arch without a table, no instruction, an unknown matrix instruction, or a branch whose target the
    text does not give.
    """
    if arch not in ARCHS:
        raise ValueError(f"hazards of {arch} are not known: there are tables for {', '.join(ARCHS)}")
    program = instructions(text.splitlines())
    if not program:
        raise UnknownFlow("no line has an instruction of assembly or of a listing by llvm-objdump")
    worst: dict[tuple[int, int, str, tuple[str, int, int]], Finding] = {}
    producers = [
        [_Producer(index, effect, item.operation) for effect in item.operation.does if effect.kind in _PRODUCERS]
        for index, item in enumerate(program)
    ]
    for entry, body in _blocks(program, producers):
        _walk(program, body, producers, entry, arch, worst)
    return sorted(worst.values(), key=lambda item: (item.consumer.line, item.producer.line))


def _blocks(program: Sequence[Instruction], producers: list[list[_Producer]]) -> Iterable[tuple[_State, range]]:
    """Straight runs of instructions, each with the producers that reach its begin and how far back they lie."""
    starts = {0}
    for index, item in enumerate(program):
        if item.follows != (index + 1,):
            starts |= {index + 1, *item.follows}
    order = sorted(start for start in starts if start < len(program))
    bodies = {start: range(start, end) for start, end in zip(order, [*order[1:], len(program)], strict=True)}
    entries: dict[int, _State] = {start: {} for start in order}
    left = list(reversed(order))
    waiting = set(left)
    while left:
        start = left.pop()
        waiting.discard(start)
        state = _after(program, bodies[start], producers, entries[start])
        for target in program[bodies[start][-1]].follows:
            entry, changed = entries[target], False
            for producer, distance in state.items():
                if distance < entry.get(producer, LONGEST):
                    entry[producer] = distance
                    changed = True
            if changed and target not in waiting:
                waiting.add(target)
                left.append(target)
    return [(entries[start], bodies[start]) for start in order]


def _after(program: Sequence[Instruction], body: range, producers: list[list[_Producer]], entry: _State) -> _State:
    """Returns the state at the end of a run: distances count the wait states that already lie behind the producer."""
    state: _State = {}
    distance = 0
    for index in reversed(body):
        if distance >= LONGEST:
            return state
        for producer in producers[index]:
            state.setdefault(producer, distance)
        distance += program[index].operation.waits
    for producer, before in entry.items():
        if before + distance < LONGEST:
            state[producer] = min(before + distance, state.get(producer, LONGEST))
    return state


def _walk(
    program: Sequence[Instruction],
    body: range,
    producers: list[list[_Producer]],
    entry: _State,
    arch: str,
    worst: dict[tuple[int, int, str, tuple[str, int, int]], Finding],
) -> None:
    """Adds to `worst` what the instructions of one run lack, the closest case of each pair and rule."""
    recent: dict[tuple[str, int], list[tuple[int, _Producer]]] = {}
    now = 0

    def remember(producer: _Producer, time: int) -> None:
        file, first, last = producer.effect.register
        for number in range(first, last + 1):
            kept = recent.setdefault((file, number), [])
            if kept and kept[0][0] <= time - LONGEST:
                kept[:] = [one for one in kept if one[0] > time - LONGEST]
            kept.append((time, producer))

    for producer, distance in entry.items():
        remember(producer, -distance)
    for index in body:
        item = program[index]
        forwarded = set[_Producer]()
        for need in item.operation.needs:
            file, first, last = need.register
            for number in range(first, last + 1):
                for time, producer in recent.get((file, number), ()):
                    found = now - time
                    if found >= LONGEST or (producer.effect.kind, need.kind) not in _PAIRS:
                        continue
                    rule = _rule(producer, need, item.operation)
                    if rule is None:
                        continue
                    if rule is _CHAINED:
                        forwarded.add(producer)
                    required = rule.required(arch, producer.operation.passes)
                    key = (producer.index, index, rule.producer + rule.consumer, producer.effect.register)
                    if found < required and (key not in worst or found < worst[key].found):
                        name = _spell(producer.effect.register)
                        worst[key] = Finding(arch, rule, program[producer.index], item, name, required, found)
        now += item.operation.waits
        for producer in producers[index]:
            if forwarded and producer.effect.kind == _CHAINED.producer:
                file, first, last = producer.effect.register
                for number in range(first, last + 1):
                    kept = recent.get((file, number), [])
                    kept[:] = [one for one in kept if one[1] not in forwarded]
            remember(producer, now)


def _rule(producer: _Producer, need: Effect, consumer: Operation) -> Rule | None:
    """The row for this producer and this need; a chain on one accumulator by one instruction has rows of its own."""
    kind = need.kind
    before = producer.operation
    same = before.opcode == consumer.opcode and before.passes == consumer.passes
    if producer.effect.kind == "dot" and kind.startswith("dot_"):
        if not same:
            kind = "any_read"
        elif kind == "dot_ab" or producer.effect.register != need.register:
            kind = "dot_ab_same"
    elif producer.effect.kind == "dot" and kind in ("any_write", "valu_write") and same:
        return None
    elif kind.endswith("_c") and same and producer.effect.register == need.register:
        kind += "_same"
    return BY_CLASSES.get((producer.effect.kind, kind))


_NAMES = {106: "vcc", 107: "vcc", 124: "m0", 126: "exec", 127: "exec"}


def _spell(register: tuple[str, int, int]) -> str:
    file, first, last = register
    if file == "h":
        return f"hardware register {first}"
    if file == "s" and first in _NAMES:
        return _NAMES[first]
    return f"{file}{first}" if first == last else f"{file}[{first}:{last}]"


def sentences(where: str, text: str, arch: str) -> list[str]:
    """`check` as sentences for a person, each beginning with `where`; a text that cannot be followed is one, too."""
    try:
        return [f"{where}: {finding}" for finding in check(text, arch)]
    except UnknownFlow as error:
        return [f"{where}: {error}, so its hazards cannot be checked"]
