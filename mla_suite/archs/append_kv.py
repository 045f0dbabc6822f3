"""append_kv on native kernels: the layout of a KV format and the metadata of tensors become a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from mla_suite.archs import ArchSpec
from mla_suite.build.params import divisor
from mla_suite.core import checks
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import KVFormat, get_kv_format
from mla_suite.kv_formats.declare import LEAST_POWER_OF_TWO
from mla_suite.launch import missing
from mla_suite.launch.spec import CallSpec, LaunchSpec, inputs, present
from mla_suite.ops.append_kv import AppendKvArgs, Problem

WAVES = 8  # waves of a workgroup that writes one token
THREADS = 1024  # threads of a workgroup that writes several tokens
MAX_TOKENS = 512  # tokens of a workgroup
MAX_SINGLE_TOKENS = 8  # tokens for each compute unit: up to this number, a workgroup writes one
ENCODINGS = {"bf16": 0, "fp16": 1, "fp32": 2, "e4m3fn": 3, "e4m3fnuz": 4, "e8m0": 5, "e2m1": 6}
IN_TYPES = {torch.bfloat16: ENCODINGS["bf16"], torch.float16: ENCODINGS["fp16"], torch.float32: ENCODINGS["fp32"]}
VALUES = frozenset({"bf16", "fp16", "fp32", "e4m3fn", "e4m3fnuz"})
"""Encodings of latents and rope values."""
RUN_VALUES = frozenset({"e4m3fn", "e2m1"})
"""Encodings of a row that is one run (is_one_run)."""
MAX_SCALE_GROUP = 128
MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True)
class AppendConfig:
    """The kernel for workgroups that write `tokens` tokens, 1 to MAX_TOKENS.

    bulk_bytes  dynamic shared memory of a workgroup that writes several tokens
    one_run     see is_one_run
    """

    arch: ArchSpec = field(repr=False)
    tokens: int
    bulk_bytes: int = 0
    one_run: bool = field(default=False, kw_only=True)

    @property
    def bulk(self) -> bool:
        """Whether a workgroup has all waves that it can."""
        return self.tokens > 1

    @property
    def instance(self) -> str:
        tokens = f"tokens-{MAX_TOKENS if self.bulk else 1}"
        return f"append_kv_run_{tokens}_onerun-1" if self.one_run else f"append_kv_{tokens}"

    @property
    def threads(self) -> int:
        return THREADS if self.bulk else WAVES * self.arch.wavefront

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.bulk_bytes if self.bulk and not self.one_run else 0

    def spec(self, outputs: tuple[torch.Tensor, ...], args: AppendKvArgs) -> CallSpec:
        """One launch."""
        (tokens, latent), (num_pages, page_size, _) = args.kv_c.shape, args.kv_cache.shape
        slots = num_pages * page_size
        if tokens == 0 or slots == 0:
            return CallSpec()
        if slots > MAX_SLOTS:
            checks.fail("append_kv", "kv_cache", f"has {slots} slots", f"the native kernel takes {MAX_SLOTS}")
        cos_sin, positions = args.cos_sin, args.positions
        numbers = dict(
            kv_c_stride=args.kv_c.stride(0),
            k_pe_stride=args.k_pe.stride(0),
            cos_sin_stride=0 if cos_sin is None else cos_sin.stride(0),
            block_bytes=args.kv_cache.stride(0) * args.kv_cache.element_size(),
            tokens=tokens,
            group=self.tokens,
            slots=slots,
            in_type=IN_TYPES[args.kv_c.dtype],
            angle_type=0 if cos_sin is None else IN_TYPES[cos_sin.dtype],
            wide_slots=int(args.slot_mapping.dtype == torch.int64),
            wide_positions=int(positions is not None and positions.dtype == torch.int64),
            interleaved=int(args.interleaved),
            **_of_kv_format(args.kv_format, latent, args.k_pe.shape[1], page_size),
        )
        grid = (-(-tokens // self.tokens), 1, 1)
        launch = LaunchSpec(
            self.instance, grid, self.threads, self.shared, True, "append_kv", numbers, present(args, _POINTERS)
        )
        return CallSpec((launch,))


def is_one_run(fmt: KVFormat) -> bool:
    """Whether a record's whole row is one run of values that are scaled alike."""
    return fmt.seamless and fmt.scale_rule is not None


def supports(problem: Problem, arch: ArchSpec, bulk_bytes: int = 0, has_runs: bool = False) -> Supported | Unsupported:
    """`bulk_bytes`: as in AppendConfig. `has_runs`: the arch has kernels of one run."""
    fmt = get_kv_format(problem.kv_format)
    if "e2m1" in fmt.encodings and problem.latent % 2:
        given = f"kv_format {fmt.name} holds two values to a byte"
        return Unsupported(f"{given}; {arch.name}'s kernels divide its rows between bytes, not behind {problem.latent}")
    fmt = fmt.sized(problem.latent, problem.rope)
    beyond = fmt.scaled > fmt.latent or "e2m1" in fmt.encodings  # what kernels of any kv_format do not store
    one_run = has_runs and is_one_run(fmt) and beyond
    if beyond and not one_run:
        given = f"kv_format {fmt.name} scales its rope values too or has values of 4 bits"
        return Unsupported(f"{given}; {arch.name}'s kernels of any kv_format store neither")
    if unstored := _unstored(fmt, one_run):
        return Unsupported(unstored)
    needed = min(fmt.alignment, 4)  # bytes of the widest single store
    if problem.alignment < needed:
        given = f"kv_cache is aligned to {problem.alignment} bytes"
        return Unsupported(f"{given}; kv_format {fmt.name} needs {needed}")
    config = AppendConfig(arch, tokens_of_workgroup(problem.tokens, arch), bulk_bytes, one_run=one_run)
    answer = Supported(config, f"{config.instance}, {config.tokens} to a workgroup, any kv_format")
    return missing(arch, config.instance) or answer


def _unstored(fmt: KVFormat, one_run: bool) -> str:
    """What of a record the kernels do not store, in a sentence; empty where they store all of it."""
    given, taken = f"kv_format {fmt.name} has", RUN_VALUES if one_run else VALUES
    if others := {field.encoding for field in fmt.value_fields} - taken:
        return f"{given} values in {', '.join(sorted(others))}; the kernel takes {', '.join(sorted(taken))}"
    if not all(field.aligned for field in fmt.fields):
        return f"{given} fields that lie off their elements; the kernel stores whole ones"
    rule = fmt.scale_rule
    if rule is None:
        return ""
    halves = "e2m1" in fmt.encodings
    if rule.tile > MAX_SCALE_GROUP or (halves and rule.tile % 2):
        most = f"{MAX_SCALE_GROUP}{', in pairs' if halves else ''}"
        return f"{given} a scale for {rule.tile} values; the kernel takes {most}"
    whole = fmt.head_dim if one_run else fmt.latent
    if fmt.scaled != whole:
        return f"{given} scales for {fmt.scaled} of {whole} values; the kernel takes all or none"
    # The kernels divide by the scale before it is encoded, so its encoding must hold it; only runs round it to e4m3.
    encoding, powers = fmt.by_name["scale"].encoding, rule.power_of_two
    if not (encoding == "fp32" or (powers and encoding in ("bf16", "e8m0")) or (one_run and encoding == "e4m3fn")):
        kind = "powers of two" if powers else "scales of any bits"
        runs = " and, for values of 4 bits or whole rows, e4m3fn" if one_run else ""
        return f"{given} {kind} in {encoding}; the kernel takes fp32, powers of two in bf16 or e8m0{runs}"
    if powers and rule.smallest < LEAST_POWER_OF_TWO:
        return (
            f"{given} scales from {rule.smallest:.3g} on; the kernel takes powers of two from {LEAST_POWER_OF_TWO:.3g}"
        )
    return ""


def tokens_of_workgroup(tokens: int, arch: ArchSpec) -> int:
    """A workgroup looks through all later slots, so beyond a few workgroups per compute unit they share the look: then
    there is one for each unit, as far as its table goes."""
    shared = min(-(-tokens // arch.compute_units), MAX_TOKENS)
    return shared if shared > MAX_SINGLE_TOKENS else 1


_POINTERS = inputs(AppendKvArgs)


@lru_cache(maxsize=1024)
def _of_kv_format(kv_format: str, latent: int, rope: int, page: int) -> dict[str, int | float]:
    """The parameters that follow from the kv_format and the page size."""
    fmt = get_kv_format(kv_format).sized(latent, rope)
    rule = fmt.scale_rule
    found: dict[str, int | float] = dict(
        latent=latent,
        rope=rope,
        page=page,
        **divisor("page", page),
        tile=0 if rule is None else rule.tile,
        divisor=1.0 if rule is None else rule.divisor,
        smallest=0.0 if rule is None else rule.smallest,
        power_of_two=int(rule is not None and rule.power_of_two),
        pad=fmt.by_name["pad"].bytes if "pad" in fmt.by_name else 0,
    )
    for name in ("latent", "rope", "scale", "pad"):
        field = fmt.by_name.get(name)
        found[f"{name}_offset"] = 0 if field is None else field.offset
        found[f"{name}_stride"] = 0 if field is None else field.stride
        found[f"{name}_per_block"] = 0 if field is None else field.per_block
        if name != "pad":
            found[f"{name}_encoding"] = 0 if field is None else ENCODINGS[field.encoding]
    return found
