"""ISA budgets: limits in `arch.toml` on a kernel's machine code, checked when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mla_suite.build.instances import Instance
from mla_suite.build.report import Loop, Resources


def occupancy(instance: Instance, resources: Resources) -> int:
    """Waves per SIMD that fit, with the instance's dynamic LDS."""
    return instance.arch.waves_per_simd(
        resources.registers, resources.lds + instance.dynamic_lds, resources.threads or instance.arch.max_threads
    )


def _per_token(instance: Instance, loop: Loop | None, count: Callable[[Loop], int]) -> float | None:
    return None if loop is None or not instance.tokens else count(loop) / instance.tokens


RULES: Mapping[str, Callable[[Instance, Resources], float | None]] = {
    "spills": lambda item, found: found.spills,
    "scratch": lambda item, found: found.scratch,
    "lds": lambda item, found: found.lds + item.dynamic_lds,
    "registers": lambda item, found: found.registers,
    "sgprs": lambda item, found: found.sgprs,
    "matrix_per_token": lambda item, found: _per_token(item, found.loop, lambda loop: loop.matrix),
    "lds_reads_per_token": lambda item, found: _per_token(item, found.loop, lambda loop: loop.lds_reads),
    "min_load_bytes": lambda item, found: None if found.loop is None else found.loop.widest_load,
    "min_occupancy": occupancy,
}
"""Every budget key -> what it limits; None cannot be measured. Those named min_ are least values, the others greatest;
spills and scratch are always 0."""


def broken(instance: Instance, resources: Resources) -> list[str]:
    """One sentence per broken rule, with the number given and the number allowed; empty when all hold."""
    where = f"{instance.arch.name} {instance.id}"
    unknown = sorted(set(instance.budget) - set(RULES))
    if unknown:
        return [f"{where}: unknown budget keys {unknown}; possible are {', '.join(RULES)}"]
    limits: Mapping[str, float] = {
        "lds": instance.arch.lds_bytes,
        "min_occupancy": 1,
        **instance.budget,
        "spills": 0,
        "scratch": 0,
    }
    sentences = []
    for rule, allowed in limits.items():
        given = RULES[rule](instance, resources)
        if given is None:
            lacking = "no main loop was found in the text"
            if rule != "min_load_bytes":
                lacking = "there is no main loop or no tokens_per_iteration"
            sentences.append(f"{where}: {rule} is budgeted at {allowed:g}, but {lacking}")
        elif rule.startswith("min_") and given < allowed:
            sentences.append(f"{where}: {rule} is {given:g}, at least {allowed:g} is required")
        elif not rule.startswith("min_") and given > allowed:
            scalar = f" ({resources.scalar_spills} of them scalar)" if rule == "spills" else ""
            sentences.append(f"{where}: {rule} is {given:g}{scalar}, at most {allowed:g} is allowed")
    if resources.serialized:
        sentences.append(f"{where}: ptxas makes every wgmma wait for the one before, due to {resources.serialized}")
    return sentences
