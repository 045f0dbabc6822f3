"""`explain --on ARCH` says what a GPU that is not here would run: the kernel, the splits, or why not the kernel."""

import pytest
import torch

import mla_suite
from mla_suite import archs
from mla_suite.__main__ import main
from mla_suite.archs.attention import decode_shape
from mla_suite.archs.sm_90.decode import Sm90Config
from mla_suite.archs.sm_90.decode_splits import split_count
from mla_suite.cli import problem
from mla_suite.core import register
from mla_suite.core.explain import Explanation, explain_on
from mla_suite.ops.decode import DecodeArgs


@pytest.fixture(autouse=True)
def _all_built(archs_left_out):
    if archs_left_out:
        missing = ", ".join(sorted(archs_left_out))
        pytest.skip(f"`explain` takes kernels that are built here, and those of {missing} are not")


def on(arch: str, op: str, **options: object) -> Explanation:
    record = archs.get(arch)
    args, kwargs = problem.without_values(op, options, record)
    return explain_on(record, op, *args, **kwargs)


@pytest.mark.parametrize("arch", archs.registered())
@pytest.mark.parametrize("planned", [False, True], ids=["equal", "planned"])
def test_a_bf16_batch_is_native_everywhere(arch, planned):
    answer = on(arch, "decode", batch=128, heads=128, kv=4096, **({"plan": True} if planned else {}))
    assert (answer.arch, answer.backend) == (arch, "native")
    assert any("the plan splits" in note if planned else "split" in note for note in answer.notes)


@pytest.mark.parametrize(("op", "options"), [("decode", {"kv": 512}), ("sparse_decode", {"topk": 512})])
@pytest.mark.parametrize("arch", archs.registered())
def test_what_no_kernel_takes_goes_to_triton_and_says_why(arch, op, options):
    answer = on(arch, op, heads=16, q_dtype="float32", kv_format="fp32", **options)
    assert answer.backend == "triton"
    assert dict(answer.refused)["native"]


@pytest.mark.parametrize("kv_format", ["bf16", "v32"])
def test_where_only_the_reference_serves_a_gpu_refuses(kv_format):
    answer = on("sm_90", "decode", heads=16, kv=512, kv_format=kv_format)
    error = "no kernel takes it: outside `with mla_suite.allow_reference():` the call is an error on a GPU"
    assert (error in answer.notes) == (answer.backend == "reference") == (kv_format == "v32")


def test_the_splits_it_names_are_those_of_the_launch():
    options = {"batch": 4, "heads": 128, "kv": 8192}
    args, kwargs = problem.without_values("decode", options, archs.get("sm_90"))
    given = DecodeArgs(*args, **kwargs)
    out = torch.empty(4, 1, 128, 512, dtype=torch.bfloat16, device="meta")
    config = Sm90Config(archs.get("sm_90"), "bf16", 576, "tma")
    number = split_count(config, decode_shape(given, out))
    assert number > 1
    assert any(note.startswith(f"{number} splits of each sequence") for note in on("sm_90", "decode", **options).notes)


@pytest.mark.parametrize(("arch", "op"), [("gfx942", "decode"), ("gfx950", "decode"), ("gfx950", "sparse_decode")])
def test_forced_splits_are_named(arch, op):
    length = {"decode": "kv", "sparse_decode": "topk"}[op]
    answer = on(arch, op, batch=2, heads=16, num_splits=3, **{length: 2048})
    assert any(note.startswith("3 splits of each") for note in answer.notes)


def test_one_sequence_with_a_plan_on_sm_90_is_split_evenly():
    notes = on("sm_90", "decode", heads=16, kv=8192, plan=True).notes
    assert any("the plan is not read" in note for note in notes)
    assert any("splits of each sequence" in note for note in notes)


@pytest.mark.parametrize("arch", archs.registered())
def test_every_sample_of_every_operator_is_explained(arch, capsys):
    for name in register.registry():
        assert main(["explain", name, "--on", arch]) == 0
    answers = [line for line in capsys.readouterr().out.splitlines() if f" on {arch} -> " in line]
    assert len(answers) == sum(len(record.samples()) for record in register.registry().values())


def test_the_command_prints_one_problem(capsys):
    assert (
        main(["explain", "sparse_decode", "--on", "gfx950", "--heads", "16", "--topk", "2048", "--kv-format", "dsv4"])
        == 0
    )
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "sparse_decode on gfx950 -> native (gfx950): dsv4 records, tiles of 16 rows for 16 heads"
    assert "  32 splits of each query token, whose 32 partial results combine merges" in rest


def test_what_is_emulated_has_the_plan_of_the_arch(capsys):
    """`emulate` and `explain --time` run the tensors of with_values; both commands say the parts of their plan."""
    options = {"batch": 2, "heads": 16, "q_len": 2, "kv": 100}
    with mla_suite.emulate("gfx942") as arch:
        args, _ = problem.with_values({**options, "plan": True}, arch).make(torch.device("cpu"))
        own = mla_suite.plan(args[2], num_heads=16, max_seqlen_q=2, max_seqlen_kv=100)
    assert torch.equal(args[DecodeArgs.__match_args__.index("plan")], own)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()] + ["--plan", "--on=gfx942"]
    said = set()
    for command in ("explain", "emulate"):
        assert main([command, "decode", *words]) == 0
        said |= {line.strip() for line in capsys.readouterr().out.splitlines() if "the plan splits" in line}
    assert len(said) == 1
