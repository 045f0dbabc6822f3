"""From `csrc/<arch>/arch.toml` to the kernel instances that a build makes: a source plus named constants."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_suite import archs as arch_records
from mla_suite.archs import CSRC, ArchSpec

Constants = Mapping[str, "int | str"]

_KERNEL_KEYS = {"source", "params", "instances", "tuned", "budget", "tokens_per_iteration", "dynamic_lds"}
_CONSTANT = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True)
class Instance:
    """One object to build.

    `id` is unique within its arch; `symbol` is the C name of its entry; `tokens` is the number of KV tokens that one
    turn of the main loop handles, 0 where the notion does not apply; `dynamic_lds` is the most dynamic LDS, in bytes,
    that it is launched with; `budget` maps a rule's name to the allowed number.
    """

    arch: ArchSpec
    kernel: str
    id: str
    symbol: str
    source: str
    params: str
    constants: Constants
    budget: Mapping[str, float]
    tokens: int
    dynamic_lds: int


def instance_id(kernel: str, constants: Constants) -> str:
    """`combine` with {"OUT": "bf16", "D_V": 512} is `combine_out-bf16_dv-512`: constants in declared order."""
    return "_".join([kernel, *(f"{key.replace('_', '').lower()}-{str(v).lower()}" for key, v in constants.items())])


def instances(arch: str, csrc: Path = CSRC) -> tuple[Instance, ...]:
    """Every instance that `arch.toml` declares, and those that shipped tuned tables name.

    ValueError, in one sentence, for a declaration that cannot be built.
    """
    made: dict[str, Instance] = {}
    for kernel, table in arch_records.read_arch_file(arch, csrc).get("kernels", {}).items():
        where = f"{csrc / arch / 'arch.toml'}: kernel {kernel}"
        unknown = sorted(set(table) - _KERNEL_KEYS)
        if unknown or "source" not in table:
            raise ValueError(f"{where}: unknown keys {unknown}; possible are {sorted(_KERNEL_KEYS)}, source is needed")
        if not (csrc / arch / table["source"]).is_file():
            raise ValueError(f"{where}: no source {csrc / arch / table['source']}")
        for constants in _points(where, table):
            item = _instance(arch, kernel, table, constants, csrc)
            if item.id in made:
                raise ValueError(f"{where}: two instances are named {item.id}")
            made[item.id] = item
        for constants in _tuned_points(where, table.get("tuned"), csrc.resolve().parent / "ops", arch):
            item = _instance(arch, kernel, table, constants, csrc)
            made.setdefault(item.id, item)
    return tuple(made.values())


def instance(arch: str, kernel: str, constants: Constants) -> Instance:
    """The instance of a declared kernel with these constants, declared or not. ValueError for an unknown kernel."""
    declared = arch_records.read_arch_file(arch, CSRC).get("kernels", {})
    if kernel not in declared:
        raise ValueError(f"{arch} has no kernel {kernel!r}; it has {', '.join(declared)}")
    return _instance(arch, kernel, declared[kernel], constants, CSRC)


def _instance(arch: str, kernel: str, table: Mapping[str, Any], constants: Constants, csrc: Path) -> Instance:
    where = f"{csrc / arch / 'arch.toml'}: kernel {kernel}"
    return Instance(
        arch=arch_records.get(arch, csrc),
        kernel=kernel,
        id=instance_id(kernel, constants),
        symbol=instance_id(kernel, constants).replace("-", "_"),
        source=f"{arch}/{table['source']}",
        params=table.get("params", kernel),
        constants=constants,
        budget=table.get("budget", {}),
        tokens=_number(where, table, "tokens_per_iteration"),
        dynamic_lds=_number(where, table, "dynamic_lds"),
    )


def _tuned_points(where: str, tuned: Mapping[str, Any] | None, ops: Path, arch: str) -> list[dict[str, int | str]]:
    """The constants that each row of the operator's shipped table for the arch names.

    tuned   {"op": operator, "columns": {constant: column}}; a constant whose cell is 0 is left undefined
    """
    if tuned is None:
        return []
    path = ops / tuned["op"] / "tuned" / f"{arch}.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    points: list[dict[str, int | str]] = []
    for row in rows:
        try:
            cells = {constant: int(row[column]) for constant, column in tuned["columns"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: {path} lacks a number ({error}); `tune --lint` names the row") from error
        points.append({constant: cell for constant, cell in cells.items() if cell})
    return points


def _points(where: str, table: Mapping[str, Any]) -> list[dict[str, int | str]]:
    """The constants of each instance; a declaration that lists values stands for all their combinations."""
    points: list[dict[str, int | str]] = []
    for declared in table.get("instances", [{}]):
        axes = {key: value if isinstance(value, list) else [value] for key, value in declared.items()}
        for key, values in axes.items():
            if not values or not re.fullmatch(r"[A-Z][A-Z0-9_]*", key) or not all(map(_plain, values)):
                possible = "names are UPPER_CASE, values letters, digits and _, or a list of such"
                raise ValueError(f"{where}: constant {key} = {declared[key]!r}; {possible}")
        points += [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return points


def _plain(value: object) -> bool:
    """Whether a constant may have this value."""
    return isinstance(value, (int, str)) and not isinstance(value, bool) and bool(_CONSTANT.fullmatch(str(value)))


def _number(where: str, table: Mapping[str, Any], key: str) -> int:
    number = table.get(key, 0)
    if not isinstance(number, int):
        raise ValueError(f"{where}: {key} = {number!r} is no integer")
    return number
