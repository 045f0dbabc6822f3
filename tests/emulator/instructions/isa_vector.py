"""Checks of a vector instruction derived from its operand types and its formula: every encoding and modifier it has.

"Vector ALU Operations": operands and EXEC; input and output modifiers; "SDWA"; "DPP: data parallel primitives".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from isa_case import ALL, ARCHS, DENORMALS, DX10_CLAMP, FLUSH, LANE, Case, active, generator, random_mask, words
from isa_operands import (
    DPP,
    NARROW,
    REAL,
    SDWA,
    SIGN_BIT,
    UNUSED,
    flushed,
    is_wide,
    operands,
    pieces,
    raw_of,
    same,
    sdwa_pick,
    sdwa_place,
    typed,
)

from mla_suite.emulator import State


class Vector:
    """`Vector("v_add_f32", "f32 f32 -> f32", lambda a, b: a + b, "vop2")`.

    encoding     vop1 and vop2 have e32, e64, DPP and SDWA forms; vop3 has one
    formula      typed arrays -> the result
    accumulates  the last source is the destination
    keeps_high   a 16-bit result leaves the upper half of the register alone
    ulps         allowed distance, for the approximating instructions
    arithmetic   denormals follow the MODE register, so a flushing run and the output multipliers are checked too
    without      forms the assembler has not: "dpp", "sdwa", "e64", "scalar"
    exact        registers are moved, not computed with: NaN payloads count
    """

    def __init__(
        self,
        op: str,
        signature: str,
        formula: Callable[..., np.ndarray],
        encoding: str = "vop3",
        *,
        archs: Sequence[str] = ARCHS,
        accumulates: bool = False,
        keeps_high: bool = False,
        ulps: int = 0,
        arithmetic: bool = False,
        without: str = "",
        rows: int = 0,
        adjust: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None,
        exact: bool = False,
        tail: str = "",
    ) -> None:
        sources, _, result = signature.partition("->")
        self.op, self.archs, self.formula, self.encoding = op, archs, formula, encoding
        self.kinds, self.result = sources.split(), result.strip()
        self.accumulates, self.keeps_high, self.ulps = accumulates, keeps_high, ulps
        self.arithmetic, self.without, self.adjust, self.exact = arithmetic, without.split(), adjust, exact
        self.rows = rows or (6 if len(self.kinds) > 1 else 2)
        self.tail = tail

    # -- building blocks -------------------------------------------------------------------------------------------

    def evaluate(self, sources: list[np.ndarray]) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.formula(*(typed(raw, kind) for raw, kind in zip(sources, self.kinds, strict=True)))

    def _registers(self, sources: list[np.ndarray], old: np.ndarray) -> dict[int | str, object]:
        out: dict[int | str, object] = {}
        for k, raw in enumerate(sources):
            for w, piece in enumerate(pieces(raw)):
                for r in range(len(raw)):
                    out[self._source(r, k) + w] = piece[r]
        for w, piece in enumerate(pieces(old)):
            for r in range(len(old)):
                out[self._dest(r) + w] = piece[r]
        return out

    @staticmethod
    def _source(row: int, k: int) -> int:
        return 8 + row * 8 + k * 2

    @staticmethod
    def _dest(row: int) -> int:
        return 160 + row * 2

    def _name(self, register: int, kind: str) -> str:
        return f"v[{register}:{register + 1}]" if is_wide(kind) else f"v{register}"

    def _texts(self, suffix: str, rows: int, wrap: Sequence[str], tail: str, first: str | None = None) -> list[str]:
        out = []
        for r in range(rows):
            names = [self._name(self._source(r, k), kind) for k, kind in enumerate(self.kinds)]
            if self.accumulates:
                names = names[:-1]
            if first is not None:
                names[0] = first
            names = [form.format(name) for form, name in zip(wrap, names, strict=False)]
            destination = self._name(self._dest(r), self.result)
            out.append(f"{self.op}{suffix} {destination}, {', '.join(names)}{self.tail}{tail}")
        return out

    def _case(
        self,
        texts: list[str],
        raw: list[np.ndarray],
        seen: list[np.ndarray],
        old: np.ndarray,
        *,
        lanes: np.ndarray,
        exec_mask: int = ALL,
        mode: int = DENORMALS,
        sgpr: dict[int | str, int] | None = None,
        after: Callable[[np.ndarray], np.ndarray] | None = None,
        place: tuple[str, str] | None = None,
        zeros: bool = False,
    ) -> Case:
        """`raw` fills the registers, `seen` is what the formula sees of them, `after` is done to the typed result."""

        def check(state: State) -> None:
            value = np.asarray(self.evaluate(seen))
            if after is not None:
                value = after(value)
            want = raw_of(value, self.result)
            fine = np.zeros(want.shape, bool)
            if place is not None:
                fine = np.isnan(value) if self.result in REAL else fine
                want = sdwa_place(old, want, *place)
            elif self.result in NARROW and self.keeps_high:
                want = want | (old & np.uint32(0xFFFF0000))
            want = np.where(lanes, want, old)
            rows = range(len(old))
            got = np.stack([state.v[self._dest(r)] for r in rows])
            if is_wide(self.result):
                high = np.stack([state.v[self._dest(r) + 1] for r in rows])
                got = got.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
            partial = place is not None and place[0] != "DWORD"
            kind = "u32" if self.exact or partial else self.result
            fine |= same(got, want, kind, self.ulps, zeros) & ~(~lanes & (got != old))
            if not fine.all():
                r, lane = np.argwhere(~fine)[0]
                inputs = ", ".join(f"{source[r, lane]:#x}" for source in seen)
                raise AssertionError(
                    f"`{texts[r]}` lane {lane} of {inputs}: {got[r, lane]:#x}, wanted {want[r, lane]:#x} "
                    f"(was {old[r, lane]:#x}); {np.count_nonzero(~fine)} wrong"
                )

        return Case(texts, check, self._registers(raw, old), sgpr or {}, exec_mask, mode=mode)

    # -- the forms -------------------------------------------------------------------------------------------------

    def cases(self, arch: str) -> Iterable[Case]:
        rng = generator(self.op, arch)
        yield self._plain(rng, False)
        yield self._plain(rng, True)
        if "scalar" not in self.without:
            yield from self._scalars(rng)
        real = [kind in REAL for kind in self.kinds]
        if any(real) and "e64" not in self.without and not self.exact:
            yield self._modified(rng)
        if self.arithmetic:
            yield self._flushing(rng)
        if self.result == "f32" and "e64" not in self.without and "clamp" not in self.without and not self.exact:
            yield self._clamped(rng)
        narrow = not any(is_wide(kind) for kind in [*self.kinds, self.result])
        if self.encoding in ("vop1", "vop2") and narrow:
            if "dpp" not in self.without:
                for _ in range(4):
                    yield self._dpp(rng)
            if "sdwa" not in self.without:
                for _ in range(4):
                    yield self._sdwa(rng)

    def _draw(self, rng: np.random.Generator, rows: int) -> tuple[list[np.ndarray], np.ndarray]:
        sources = operands(rng, self.kinds, rows)
        if self.adjust:
            sources = self.adjust(sources)
        if self.accumulates:
            return sources, sources[-1]
        old = words(rng, rows, 64)
        return sources, old.astype(np.uint64) << np.uint64(32) | words(rng, rows, 64) if is_wide(self.result) else old

    def _suffix(self, form: str) -> str:
        return form if self.encoding in ("vop1", "vop2") else ""

    def _plain(self, rng: np.random.Generator, partial: bool) -> Case:
        rows = 1 if partial else self.rows
        raw, old = self._draw(rng, rows)
        mask = random_mask(rng) if partial else ALL
        lanes = np.broadcast_to(active(mask), (rows, 64))
        texts = self._texts(self._suffix("_e32"), rows, ["{}"] * 4, "")
        return self._case(texts, raw, raw, old, lanes=lanes, exec_mask=mask)

    def _scalars(self, rng: np.random.Generator) -> Iterable[Case]:
        """The first source is a scalar register, an inline constant, or (32 bits of) a literal."""
        kind = self.kinds[0]
        choices: list[tuple[str, int | None]] = [("s[4:5]" if is_wide(kind) else "s4", None)]
        for text, number in (("64", 64), ("-16", -16)):
            choices.append((text, number & ((1 << 64) - 1 if is_wide(kind) else 0xFFFFFFFF)))
        if kind in REAL:
            view = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]
            for text in ("-4.0", "0.5"):
                choices.append((text, int(np.array(float(text), view).view(f"u{np.dtype(view).itemsize}"))))
        elif kind in ("u32", "i32"):
            choices.append(("1.0", 0x3F800000))
        if self._suffix("_e32") and not is_wide(kind) and kind not in NARROW:
            choices.append(("0x12345678", 0x12345678))
        for text, value in choices:
            raw, old = self._draw(rng, 1)
            number = int(raw[0][0, 0]) if value is None else value
            seen = [np.full_like(raw[0], number), *raw[1:]]
            if self.adjust and value is not None and not np.array_equal(self.adjust(list(seen))[0], seen[0]):
                continue
            lanes = np.ones((1, 64), bool)
            texts = self._texts(self._suffix("_e32"), 1, ["{}"] * 4, "", first=text)
            yield self._case(texts, raw, seen, old, lanes=lanes, sgpr={"s4": number} if value is None else {})

    def _signs(self, rng: np.random.Generator, raw: list[np.ndarray]) -> tuple[list[str], list[np.ndarray]]:
        wrap, seen = [], []
        for k, (source, kind) in enumerate(zip(raw, self.kinds, strict=True)):
            form = "{}"
            if kind in REAL and not (self.accumulates and k == len(raw) - 1):
                form, source = self._one_sign(rng, source, kind)
            wrap.append(form)
            seen.append(source)
        return wrap, seen

    def _one_sign(self, rng: np.random.Generator, source: np.ndarray, kind: str) -> tuple[str, np.ndarray]:
        sign = np.array(1 << SIGN_BIT[kind], source.dtype)
        absolute, negative = bool(rng.integers(0, 2)), bool(rng.integers(0, 2))
        source = source & ~sign if absolute else source
        source = source ^ sign if negative else source
        return ("-" if negative else "") + ("|{}|" if absolute else "{}"), source

    def _modified(self, rng: np.random.Generator) -> Case:
        raw, old = self._draw(rng, 4)
        texts, parts = [], []
        for r in range(4):
            wrap, seen = self._signs(rng, [source[r : r + 1] for source in raw])
            texts.append(self._texts(self._suffix("_e64"), 4, wrap, "")[r])
            parts.append(seen)
        seen = [np.concatenate([part[k] for part in parts]) for k in range(len(raw))]
        return self._case(texts, raw, seen, old, lanes=np.ones((4, 64), bool))

    def _flush_sources(self, raw: list[np.ndarray]) -> list[np.ndarray]:
        return [
            raw_of(flushed(typed(source, kind)), kind) | (source & np.uint32(0xFFFF0000) if kind == "f16" else 0)
            if kind in ("f32", "f16")
            else source
            for source, kind in zip(raw, self.kinds, strict=True)
        ]

    def _flushing(self, rng: np.random.Generator) -> Case:
        raw, old = self._draw(rng, 4)
        seen = self._flush_sources(raw)
        after = flushed if self.result in ("f32", "f16") else None
        texts = self._texts(self._suffix("_e32"), 4, ["{}"] * 4, "")
        return self._case(texts, raw, seen, old, lanes=np.ones((4, 64), bool), mode=FLUSH, after=after)

    def _clamped(self, rng: np.random.Generator) -> Case:
        """Clamp, with DX10_CLAMP as compilers set it: NaN gives 0. Multipliers are defined where denormals are flushed
        and leave the sign of zero open."""
        raw, old = self._draw(rng, 4)
        scales = [("", 1.0), (" mul:2", 2.0), (" mul:4", 4.0), (" div:2", 0.5)] if self.arithmetic else [("", 1.0)] * 4
        factors = np.array([[factor] for _, factor in scales], np.float32)

        def after(value: np.ndarray) -> np.ndarray:
            if self.arithmetic:
                value = flushed(value)
            with np.errstate(all="ignore"):
                value = np.asarray(value, np.float32) * factors
            value = flushed(value) if self.arithmetic else value
            clamped = np.where(np.isnan(value), np.float32(0), np.clip(value, 0, 1))
            clamped[3] = value[3] if self.arithmetic else clamped[3]
            return np.where(clamped == 0, np.float32(0), clamped).astype(np.float32)

        texts = []
        for r, (scale, _) in enumerate(scales):
            clamp = "" if self.arithmetic and r == 3 else " clamp"
            texts.append(self._texts(self._suffix("_e64"), 4, ["{}"] * 4, clamp + scale)[r])
        seen = self._flush_sources(raw) if self.arithmetic else raw
        mode = (FLUSH if self.arithmetic else DENORMALS) | DX10_CLAMP
        return self._case(texts, raw, seen, old, lanes=np.ones((4, 64), bool), mode=mode, after=after, zeros=True)

    def _dpp(self, rng: np.random.Generator) -> Case:
        raw, old = self._draw(rng, 1)
        control = list(DPP)[int(rng.integers(0, len(DPP)))]
        bound, full = bool(rng.integers(0, 2)), bool(rng.integers(0, 2))
        rows, banks = (15, 15) if full else (int(rng.integers(1, 16)), int(rng.integers(1, 16)))
        mask = ALL if rng.integers(0, 2) else random_mask(rng)
        enabled = active(mask)
        source = DPP[control](LANE)
        reads = (source >= 0) & enabled[source]
        writes = enabled & (rows >> LANE // 16 & 1 == 1) & (banks >> LANE // 4 % 4 & 1 == 1)
        if not bound:
            writes &= reads
        moved = np.where(reads, raw[0][:, source], 0).astype(np.uint32)
        wrap, seen = ["{}"] * 4, [moved, *raw[1:]]
        if not self.exact:
            wrap, seen = self._signs(rng, seen)
        tail = f" {control} row_mask:{rows:#x} bank_mask:{banks:#x}" + (" bound_ctrl:0" if bound else "")
        texts = self._texts("_dpp", 1, wrap, tail)
        return self._case(texts, raw, seen, old, lanes=writes[None], exec_mask=mask)

    def _sdwa(self, rng: np.random.Generator) -> Case:
        raw, old = self._draw(rng, 1)
        mask = ALL if rng.integers(0, 2) else random_mask(rng)
        wrap, seen, tail = [], [], ""
        for k, (source, kind) in enumerate(zip(raw, self.kinds, strict=True)):
            if k >= 2 or (self.accumulates and k == len(raw) - 1):
                seen.append(source)
                continue
            select = SDWA[int(rng.integers(0, 7))]
            extend = kind not in REAL and bool(rng.integers(0, 2))
            picked = sdwa_pick(source, select, extend)
            tail += f" src{k}_sel:{select}"
            form = "sext({})" if extend else "{}"
            if kind in REAL and not self.exact:
                form, picked = self._one_sign(rng, picked, kind)
            wrap.append(form)
            seen.append(picked)
        place = (SDWA[int(rng.integers(0, 7))], UNUSED[int(rng.integers(0, 3))])
        if self.result == "f32":
            place = ("DWORD", "UNUSED_PRESERVE")
        tail = f" dst_sel:{place[0]} dst_unused:{place[1]}{tail}"
        texts = self._texts("_sdwa", 1, wrap, tail)
        return self._case(texts, raw, seen, old, lanes=active(mask)[None], exec_mask=mask, place=place)
