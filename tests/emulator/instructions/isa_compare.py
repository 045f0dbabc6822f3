"""Vector comparisons: VOPC in e32, e64 and SDWA form. A lane that EXEC leaves out gives a zero bit; the X forms write
EXEC as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from isa_case import ALL, ARCHS, Case, active, generator, mask_of, random_mask, register
from isa_operands import EDGES, REAL, SDWA, SIGN_BIT, draw, is_wide, operands, sdwa_pick, typed

from mla_suite.emulator import State

Function = Callable[[np.ndarray, np.ndarray], np.ndarray]

_ORDER: dict[str, Function] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_INTEGER = _ORDER | {
    "ne": lambda a, b: a != b,
    "f": lambda a, b: np.zeros(a.shape, bool),
    "t": lambda a, b: np.ones(a.shape, bool),
}


def _unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


_REAL = _ORDER | {
    "lg": lambda a, b: ~_unordered(a, b) & (a != b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: _unordered(a, b) | (a == b),
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
    "f": lambda a, b: np.zeros(a.shape, bool),
    "tru": lambda a, b: np.ones(a.shape, bool),
}


def in_class(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """V_CMP_CLASS: bits 0.. are sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    raw = x.view(np.uint32)
    quiet = raw >> np.uint32(22) & np.uint32(1) == 1
    tiny = np.finfo(np.float32).tiny
    negative = np.signbit(x)
    classes = [
        np.isnan(x) & ~quiet,
        np.isnan(x) & quiet,
        np.isneginf(x),
        np.isfinite(x) & negative & (np.abs(x) >= tiny),
        negative & (np.abs(x) < tiny) & (x != 0),
        negative & (x == 0),
        ~negative & (x == 0),
        ~negative & (np.abs(x) < tiny) & (x != 0),
        np.isfinite(x) & ~negative & (np.abs(x) >= tiny),
        np.isposinf(x),
    ]
    return sum(((mask >> bit & 1) == 1) & member for bit, member in enumerate(classes)).astype(bool)


class Compare:
    def __init__(self, op: str, kinds: tuple[str, str], function: Function, modifiers: bool = True) -> None:
        self.op, self.kinds, self.function, self.modifiers = op, kinds, function, modifiers
        self.archs = ARCHS

    def _name(self, k: int) -> str:
        return f"v[{8 + 2 * k}:{9 + 2 * k}]" if is_wide(self.kinds[k]) else f"v{8 + 2 * k}"

    def _case(
        self, rng: np.random.Generator, text: str, target: int, raw: list[np.ndarray], seen: list[np.ndarray], mask: int
    ) -> Case:
        with np.errstate(all="ignore"):
            truth = self.function(*(typed(source, kind) for source, kind in zip(seen, self.kinds, strict=True)))
        want = mask_of(truth.astype(bool) & active(mask))
        execs = want if self.op.startswith("v_cmpx") else mask

        def check(state: State) -> None:
            assert state.s64(target) == want, (text, hex(state.s64(target)), hex(want))
            assert state.s64(126) == execs, (text, "exec", hex(state.s64(126)), hex(execs))

        return Case([text], check, {8: raw[0], 10: raw[1]}, {f"s{target}": 0x1111111122222222}, exec_mask=mask)

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        names = [self._name(0), self._name(1)]
        grid = operands(rng, self.kinds, 5)
        for row in range(5):
            raw = [source[row] for source in grid]
            yield self._case(rng, f"{self.op}_e32 vcc, {names[0]}, {names[1]}", 106, raw, raw, ALL)
        raw = [draw(rng, kind, 64) for kind in self.kinds]
        yield self._case(rng, f"{self.op}_e32 vcc, {names[0]}, {names[1]}", 106, raw, raw, random_mask(rng))
        sign = [
            np.array(1 << SIGN_BIT[kind], source.dtype) if kind in REAL else None
            for kind, source in zip(self.kinds, raw, strict=True)
        ]
        forms, seen = list(names), list(raw)
        for k in range(2):
            if sign[k] is not None and self.modifiers:
                forms[k] = f"-|{names[k]}|" if k else f"-{names[k]}"
                seen[k] = (raw[k] & ~sign[k] if k else raw[k]) ^ sign[k]
        yield self._case(rng, f"{self.op}_e64 s[20:21], {forms[0]}, {forms[1]}", 20, raw, seen, random_mask(rng))
        same = [raw[0], np.full_like(raw[1], EDGES.get(self.kinds[1], [0, 1, 7])[2])]
        yield self._case(rng, f"{self.op}_e64 vcc, {names[0]}, {names[1]}", 106, same, same, ALL)
        if not any(is_wide(kind) for kind in self.kinds):
            for _ in range(2):
                picks = [SDWA[int(rng.integers(0, 7))] for _ in range(2)]
                extend = [kind not in REAL and bool(rng.integers(0, 2)) for kind in self.kinds]
                if self.op.endswith("class_f32"):
                    extend = [False, False]
                seen = [sdwa_pick(source, pick, e) for source, pick, e in zip(raw, picks, extend, strict=True)]
                forms = [f"sext({name})" if e else name for name, e in zip(names, extend, strict=True)]
                target, name = (106, "vcc") if rng.integers(0, 2) else (20, "s[20:21]")
                text = f"{self.op}_sdwa {name}, {forms[0]}, {forms[1]} src0_sel:{picks[0]} src1_sel:{picks[1]}"
                yield self._case(rng, text, target, raw, seen, random_mask(rng))


for prefix in ("v_cmp", "v_cmpx"):
    for suffix in ("u32", "i32", "u64", "i64"):
        register(*(Compare(f"{prefix}_{name}_{suffix}", (suffix, suffix), f) for name, f in _INTEGER.items()))
    for suffix in ("f32", "f64"):
        register(*(Compare(f"{prefix}_{name}_{suffix}", (suffix, suffix), f) for name, f in _REAL.items()))
    register(Compare(f"{prefix}_class_f32", ("f32", "u32"), in_class, modifiers=False))
register(*(Compare(f"v_cmp_{name}_f16", ("f16", "f16"), f) for name, f in _REAL.items()))
for suffix in ("u16", "i16"):
    for name, f in _INTEGER.items():
        if name not in "ft":
            register(Compare(f"v_cmp_{name}_{suffix}", (suffix, suffix), f))
