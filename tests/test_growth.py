"""Growth in a scratch copy of the package: what an operator, an arch, a KV format and a tuned row need, and no more.

The copy gets one of each. One process imports it and says what dispatch answers; the tests read its answers. Nothing is
compiled: kernels count as built where `declared_kernels` says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TOY_OPERATOR = {
    "__init__.py": '''"""scale: the sum of the values of each row, times a factor."""
from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch

from mla_suite.core import checks, dispatch, eager
from mla_suite.core.op import Op, Output
from mla_suite.core.register import register
from mla_suite.ops.row_sum import reference, samples


@dataclass(frozen=True)
class RowSumArgs:
    rows: torch.Tensor
    _: KW_ONLY
    factor: float = 1.0


class Problem(NamedTuple):
    count: int


def row_sum(rows: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    """rows [n, m] fp32 -> [n] fp32, each row's sum times `factor`."""
    return eager.call(ROW_SUM.functional, (rows,), (factor,))


def check(args: RowSumArgs) -> tuple[Output, ...]:
    checks.tensor("row_sum", "rows", args.rows, rank=2, dtypes=checks.FLOAT32)
    return (Output((args.rows.shape[0],), torch.float32),)


ROW_SUM = register(
    Op(
        name="row_sum",
        results="Tensor",
        Args=RowSumArgs,
        check=check,
        describe=lambda args: Problem(args.rows.shape[0]),
        backends=(dispatch.native_backend("row_sum"), reference.BACKEND),
        samples=samples.samples,
        outputs=("out",),
    )
)
''',
    "reference.py": '''"""The definition of row_sum."""
from mla_suite.core.dispatch import reference_backend


def run(config, outputs, args):
    outputs[0].copy_(args.rows.sum(-1) * args.factor)


BACKEND = reference_backend(run)
''',
    "samples.py": '''"""Problems of row_sum."""
import torch

from mla_suite.core.op import Sample


def samples():
    return (Sample("small", lambda device: ((torch.ones(3, 4, device=device),), {"factor": 2.0}), 60, 24),)
''',
}

TOY_FORMAT = """    KVFormat(
        "toy_fp4",
        "a record of 4-bit values with a scale per 32",
        (
            Field("latent", "e2m1", 512, 0, 400),
            Field("scale", "e8m0", 16, 256, 400),
            Field("rope", "bf16", 64, 272, 400),
        ),
        ("uint8",),
        512,
        16,
        scale_rule=ScaleRule(tile=32, divisor=6.0, smallest=1e-4, power_of_two=True),
    ),
"""

TUNED_ROW = "512,bf16,132,16,3,4,1,2,8,1,0,counted,,,,,,,,,2026-11-22,0123456789abcdef0123456789abcdef01234567,"

QUESTIONS = """
import json
from types import SimpleNamespace

import torch

import mla_suite
from mla_suite import archs, kv_formats, launch
from mla_suite.build import instances
from mla_suite.cli import serving
from mla_suite.core import dispatch, register
from mla_suite.kv_formats import cache as caches
from mla_suite.launch import launcher
from mla_suite.ops.plan import scheduler

CPU = torch.device("cpu")
said = {"folder": mla_suite.__file__}

# An operator.
rows = torch.arange(6.0).view(2, 3)
said["row_sum"] = mla_suite.row_sum(rows, factor=2.0).tolist()
compiled = torch.compile(mla_suite.row_sum, fullgraph=True, backend="aot_eager")
said["row_sum compiled"] = compiled(rows, factor=2.0).tolist()
out = torch.zeros(2)
torch.ops.mla_suite.row_sum.out(rows, factor=0.5, out=out)
said["row_sum.out"] = out.tolist()
torch.library.opcheck(torch.ops.mla_suite.row_sum.default, (rows,))


def reasons(op, arch, args, kwargs):
    problem = register.get(op).problem(*args, **kwargs)
    choice = dispatch.choose(op, register.get(op).backends, problem, arch, "cuda")
    return {"backend": choice.backend.name, "why": choice.supported.reason, "not": dict(choice.refused)}


# Archs: what dispatch answers for a copy of kernels, for a record alone and for lanes that no kernel is written for.
good, _ = archs.specs()
said["table"], said["bad"] = serving.answers()
said["needed"] = archs.needed_gpu()
with launch.declared_kernels():
    for name in ("sm_100", "sm_120", "gfx1250"):
        args, kwargs = register.get("decode").samples()[0].make(CPU)
        said[name] = reasons("decode", good[name], args, kwargs)
        said[name]["costs"] = tuple(scheduler.scheduler_costs(good[name], 16))
        said[name]["emulable"] = good[name].emulable
said["sm_120 refuses"] = []
for op in register.registry().values():
    args, kwargs = op.samples()[0].make(CPU)
    said["sm_120 refuses"].append(op.backends[0].supports(op.problem(*args, **kwargs), good["sm_120"]).reason)
args, kwargs = register.get("decode").samples()[0].make(CPU)
dispatch.clear_caches()
said["sm_100 not built"] = reasons("decode", good["sm_100"], args, kwargs)
said["workgroup costs"] = tuple(scheduler.workgroup_costs(16))
torch.version.hip = None
device = SimpleNamespace(
    major=10, minor=0, multi_processor_count=148, memory_clock_rate=3_996_000, memory_bus_width=8192, clock_rate=0
)
torch.cuda.get_device_properties = lambda index: device
found = launch.current_arch(SimpleNamespace(is_cuda=True, get_device=lambda: 5))
said["device"] = (found.name, found.compute_units)
try:
    launcher._emulable("gfx1250")
except ValueError as error:
    said["emulate gfx1250"] = str(error)

# A KV format of 4-bit values.
kind = kv_formats.get_kv_format("toy_fp4")
said["toy_fp4"] = {"token_bytes": kind.token_bytes, "width": kind.width, "dense": kind.dense}
values = torch.tensor([0.0, 0.25, 0.26, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, 6.0]).repeat(52)[:512]
exact = torch.cat((values, torch.arange(64.0))).repeat(1, 4, 1)
exact[..., 31:512:32] = 6.0  # every scale is 1
said["unpacked"] = caches.unpack(kind, caches.pack(kind, exact))[0, 3, :10].tolist()
draw = torch.Generator().manual_seed(0)
random = torch.randn(2, 16, 576, generator=draw)
packed = caches.pack(kind, random)
unpacked = caches.unpack(kind, packed)
said["largest error"] = ((unpacked - random)[..., :512].abs() / random[..., :512].abs().amax()).max().item()
said["exact again"] = torch.equal(caches.unpack(kind, caches.pack(kind, unpacked)), unpacked)
written = caches.empty(kind, 2, 16).zero_()
flat = random.flatten(0, 1)
append = (flat[:, :512], flat[:, 512:], written, torch.arange(32))
mla_suite.append_kv(*append, kv_format="toy_fp4")
said["appended"] = torch.equal(written, packed)
q = torch.randn(3, 8, 576, generator=draw).bfloat16()
indices = torch.stack([torch.randperm(32, generator=draw)[:9] for _ in range(3)]).int()
sparse = dict(kv_formats=["toy_fp4"], softmax_scale=0.05)
attended = mla_suite.sparse_decode(q, [packed], [indices], **sparse)
wanted = mla_suite.sparse_decode(q, [unpacked], [indices], kv_formats=["fp32"], softmax_scale=0.05)
said["attended"] = all(torch.equal(one, other) for one, other in zip(attended, wanted, strict=True))
with launch.declared_kernels():
    for name in ("gfx942", "gfx950", "sm_90"):
        said[f"append {name}"] = reasons("append_kv", good[name], append, dict(kv_format="toy_fp4"))
        sparse_args = (q, [packed], [indices], [None], [None])
        said[f"sparse {name}"] = reasons("sparse_decode", good[name], sparse_args, sparse)
seq_lens, block_table = torch.tensor([4, 20, 0], dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
dense = dict(softmax_scale=0.05)
attended = mla_suite.decode(q[:, None], packed, seq_lens, block_table, **dense, kv_format="toy_fp4")
wanted = mla_suite.decode(q[:, None], unpacked, seq_lens, block_table, **dense, kv_format="fp32")
said["decoded"] = all(torch.equal(one, other) for one, other in zip(attended, wanted, strict=True))
with launch.declared_kernels():
    for name in ("gfx942", "gfx950", "sm_90"):
        decode_args = (q[:, None], packed, seq_lens, block_table)
        said[f"decode {name}"] = reasons("decode", good[name], decode_args, dense | dict(kv_format="toy_fp4"))

# A tuned row.
combine_args, combine_kwargs = register.get("combine").samples()[0].make(CPU)
with launch.declared_kernels():
    said["tuned"] = reasons("combine", good["sm_90"], combine_args, combine_kwargs)
said["instances"] = [entry.id for entry in instances.instances("sm_90") if entry.id.startswith("combine")]
print(json.dumps(said))
"""


def copy_of_the_package(root: Path) -> None:
    """The tracked Python, records, tables and kernel sources; no objects."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        top, suffix = name.split("/")[0], Path(name).suffix
        if top in ("mla_suite", "ops", "csrc") and suffix in (".py", ".toml", ".csv", ".hpp", ".hip", ".cu"):
            target = root / ("mla_suite" if top != "mla_suite" else ".") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for before, after in changes:
        assert before in text, f"{path} has no {before!r}"
        text = text.replace(before, after)
    path.write_text(text)


def add_operator(package: Path) -> None:
    """A folder, and its name in the two `__init__` files that README names."""
    (package / "ops" / "row_sum").mkdir()
    for name, text in TOY_OPERATOR.items():
        (package / "ops" / "row_sum" / name).write_text(text)
    line = "from mla_suite.ops import sparse_decode as sparse_decode\n"
    edit(package / "ops" / "__init__.py", (line, line + "from mla_suite.ops import row_sum as row_sum\n"))
    line = "    from mla_suite.ops.sparse_decode import sparse_decode as sparse_decode\n"
    edit(package / "__init__.py", (line, line + "    from mla_suite.ops.row_sum import row_sum as row_sum\n"))


def add_arch(package: Path, old: str, new: str, *changes: tuple[str, str], kernels: bool) -> None:
    """A copy of an arch's two folders under another name; without `kernels` the record alone."""
    shutil.copytree(package / "csrc" / old, package / "csrc" / new)
    edit(package / "csrc" / new / "arch.toml", (f'name = "{old}"', f'name = "{new}"'), *changes)
    if kernels:
        shutil.copytree(package / "archs" / old, package / "archs" / new)
        for path in (package / "archs" / new).glob("*.py"):
            path.write_text(path.read_text().replace(old, new))


def key_of_row(line: str) -> tuple[int | str, ...]:
    """The key columns of a row of combine's table, by which rows are sorted."""
    return tuple(int(cell) if cell.isdigit() else cell for cell in line.split(",")[:6])


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    root = tmp_path_factory.mktemp("growth")
    copy_of_the_package(root)
    package = root / "mla_suite"
    add_operator(package)
    add_arch(package, "sm_90", "sm_100", kernels=True)
    add_arch(package, "sm_90", "sm_120", kernels=False)
    add_arch(package, "gfx950", "gfx1250", ("wavefront = 64", "wavefront = 32"), kernels=True)
    add_arch(package, "sm_90", "sm_121", ("wavefront = 32", "wavefront = 48"), kernels=False)
    edit(package / "kv_formats" / "__init__.py", ("_DECLARED = (\n", "_DECLARED = (\n" + TOY_FORMAT))
    table = package / "ops" / "combine" / "tuned" / "sm_90.csv"
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join((header, *sorted((*rows, TUNED_ROW), key=key_of_row))) + "\n")
    (root / "questions.py").write_text(QUESTIONS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLA_SUITE_")}
    environment |= {"PYTHONPATH": str(root), "MLA_SUITE_TUNED_DIR": str(root / "none"), "OMP_NUM_THREADS": "1"}
    asked = subprocess.run(
        [sys.executable, str(root / "questions.py")], cwd=root, env=environment, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr[-3000:]
    answers = json.loads(asked.stdout.splitlines()[-1])
    assert answers["folder"].startswith(str(root)), "another copy of the package was imported"
    return answers


def test_an_operator_needs_a_folder_and_two_names(said):
    assert said["row_sum"] == said["row_sum compiled"] == [6.0, 24.0]
    assert said["row_sum.out"] == [1.5, 6.0]


def test_an_operator_without_kernels_is_nowhere_printed_as_native(said):
    for arch, backends in said["table"].items():
        assert backends["row_sum"] == "reference", arch


def test_an_arch_that_copies_kernels_answers_for_itself(said):
    """Declared kernels count as built in the support table; a call asks for the objects, and says how to get them."""
    assert said["table"]["sm_100"] == said["table"]["sm_90"]
    assert said["device"] == ["sm_100", 148]
    assert "sm_100" in said["needed"]
    refused = said["sm_100 not built"]
    assert refused["backend"] != "native"
    assert "sm_100" in refused["not"]["native"]
    assert "python -m mla_suite build" in refused["not"]["native"]


def test_an_arch_without_kernels_is_refused_in_a_sentence(said):
    assert "native" not in said["table"]["sm_120"].values()
    assert said["needed"] == (
        'native kernels need a gfx1250, gfx942, gfx950, sm_100 or sm_90 GPU (or `mla_suite.emulate("gfx942")` on a CPU)'
    )
    assert set(said["sm_120 refuses"]) == {said["sm_120"]["not"]["native"]} == {f"{said['needed']}, not sm_120"}
    assert said["sm_120"]["costs"] == said["workgroup costs"]


def test_a_record_that_is_wrong_is_a_sentence_for_that_arch_alone(said):
    assert said["bad"] == {"sm_121": "arch sm_121: wavefront 48; nvidia has (32,)"}
    assert set(said["table"]) == {"gfx1250", "gfx942", "gfx950", "sm_100", "sm_120", "sm_90"}


def test_kernels_for_other_wavefronts_are_refused_in_a_sentence(said):
    """The copied kernels are written for 64 lanes: neither they nor their costs serve an arch of 32."""
    assert "native" not in said["table"]["gfx1250"].values()
    sentence = "the kernels of gfx1250 are not written for its wavefronts of 32 lanes"
    assert said["gfx1250"]["not"]["native"] == sentence
    assert said["gfx1250"]["costs"] == said["workgroup costs"]
    assert said["gfx1250"]["emulable"] is False
    assert said["emulate gfx1250"].startswith("emulate: gfx1250 is not emulated")


def test_a_format_of_4_bits_is_its_declaration(said):
    assert said["toy_fp4"] == {"token_bytes": 400, "width": 400, "dense": False}
    assert said["unpacked"] == [0.0, 0.0, 0.5, 1.0, 1.0, -2.0, 2.0, 4.0, 4.0, 6.0]  # ties go to the even code
    assert said["largest error"] <= 1 / 6
    assert said["exact again"]
    assert said["appended"]
    assert said["attended"]
    assert said["decoded"]


def test_kernels_that_cannot_read_4_bits_refuse_in_a_sentence(said):
    """Triton's dense decode would read each byte as a value, and the native kernels have no code for the encoding."""
    in_triton = importlib.util.find_spec("triton") is not None
    for arch in ("gfx942", "gfx950", "sm_90"):
        for op in ("append", "sparse", "decode"):
            answer = said[f"{op} {arch}"]
            serves = "triton" if in_triton and op != "decode" else "reference"
            assert answer["backend"] == serves, (op, arch, answer)
            assert set(answer["not"]) == {"native", "triton"} - {serves}
            for name, reason in answer["not"].items():
                absent = "triton is not installed" in reason or "no native kernel of" in reason
                assert absent or "toy_fp4" in reason, (op, arch, name, reason)
                assert "\n" not in reason


def test_a_tuned_row_decides_its_shape_and_asks_for_its_kernel(said):
    assert said["tuned"]["backend"] == "native"
    assert "combine/tuned/sm_90.csv:" in said["tuned"]["why"]
    assert any("rows-1_vec-2_waves-8_slices-1" in name for name in said["instances"]), said["instances"]
