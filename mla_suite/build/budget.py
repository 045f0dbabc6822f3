"""ISA budgets: limits in `arch.toml` on a kernel's machine code, checked when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mla_suite.build.instances import Instance
from mla_suite.build.report import Loop, Resources

_KERNEL: dict[str, Callable[[Resources], float]] = {"registers": lambda r: r.registers, "sgprs": lambda r: r.sgprs}
_PER_TOKEN: dict[str, Callable[[Loop], float]] = {
    "matrix_per_token": lambda loop: loop.matrix,
    "lds_reads_per_token": lambda loop: loop.lds_reads,
}
RULES = ("spills", "scratch", "lds", *_KERNEL, *_PER_TOKEN, "min_load_bytes", "min_occupancy")
"""Every budget key. Those named min_ are least values, the others greatest; spills and scratch are always 0."""


def occupancy(instance: Instance, resources: Resources) -> int:
    """Waves per SIMD that fit, with the instance's dynamic LDS."""
    return instance.arch.waves_per_simd(
        resources.registers, resources.lds + instance.dynamic_lds, resources.threads or instance.arch.max_threads
    )


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
        given = _measure(rule, instance, resources)
        if given is None:
            sentences.append(f"{where}: {rule} is budgeted at {allowed:g}, but {_UNMEASURED[rule]}")
        elif rule.startswith("min_") and given < allowed:
            sentences.append(f"{where}: {rule} is {given:g}, at least {allowed:g} is required")
        elif not rule.startswith("min_") and given > allowed:
            scalar = f" ({resources.scalar_spills} of them scalar)" if rule == "spills" else ""
            sentences.append(f"{where}: {rule} is {given:g}{scalar}, at most {allowed:g} is allowed")
    if resources.serialized:
        sentences.append(f"{where}: ptxas makes every wgmma wait for the one before, due to {resources.serialized}")
    return sentences


_UNMEASURED = {
    "min_load_bytes": "no main loop was found in the text",
    **dict.fromkeys(_PER_TOKEN, "there is no main loop or no tokens_per_iteration"),
}


def _measure(rule: str, instance: Instance, resources: Resources) -> float | None:
    if rule == "spills":
        return resources.spills
    if rule == "scratch":
        return resources.scratch
    if rule == "lds":
        return resources.lds + instance.dynamic_lds
    if rule == "min_occupancy":
        return occupancy(instance, resources)
    if rule in _KERNEL:
        return _KERNEL[rule](resources)
    loop = resources.loop
    if loop is None or (rule in _PER_TOKEN and not instance.tokens):
        return None
    return loop.widest_load if rule == "min_load_bytes" else _PER_TOKEN[rule](loop) / instance.tokens
