"""A call that check mode saved comes back as it was: strides, alignment, the pages it read; in bounded files."""

from __future__ import annotations

import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_suite.__main__ import main
from mla_suite.core import check_mode, dispatch, register, saved_call
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.decode.samples import decode_sample

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_SUITE_CHECK_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(saved_call, "_numbers", itertools.count())
    return tmp_path / "new"


def call_of(op_name: str, args: Any, kwargs: dict[str, Any], outputs: tuple[torch.Tensor, ...] = ()) -> check_mode.Call:
    op = register.get(op_name)
    return check_mode.Call(op, outputs, tuple(args), tuple((op.out.options | kwargs).values()))


@pytest.fixture
def small() -> check_mode.Call:
    args, kwargs = decode_sample((20,)).make(CPU)
    return call_of("decode", args, kwargs)


def save(call: check_mode.Call) -> str:
    choice = dispatch.ask(call.op.name, call.op.backends[-1:], None, None, "cpu")
    return saved_call.save(call, choice, "a report")


def saved(call: check_mode.Call, folder: Path) -> saved_call.Saved:
    assert save(call).startswith("run it again with: ")
    (file,) = folder.iterdir()
    return saved_call.load(file)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.dim() else tensor


def assert_same(made: Any, given: Any) -> None:
    if given is None:
        assert made is None
        return
    assert (made.shape, made.stride(), made.dtype) == (given.shape, given.stride(), given.dtype)
    assert made.data_ptr() % 16 == given.data_ptr() % 16
    assert torch.equal(bits(made), bits(given))


@pytest.mark.parametrize("name", ["bf16", "fp8", "dsv4", "v32"])
def test_a_call_comes_back_with_its_strides_and_the_pages_it_reads(name, folder):
    """Queries inside a wider row and at an odd element, blocks that lie apart, scales without dimensions."""
    kind = get_kv_format(name)
    rows = torch.randn(9, 7, kind.head_dim)
    cache = caches.pack(kind, rows, descale=torch.tensor(0.1) if kind.per_tensor_descale else None)
    q = torch.randn(2, 1, 4, 700).bfloat16()[..., 5 : 5 + kind.head_dim]
    seq_lens, block_table = torch.tensor([8, 3]).int(), torch.tensor([[4, 8], [2, -7]]).int()
    descale = torch.tensor(0.1) if kind.per_tensor_descale else None
    args = [q, cache, seq_lens, block_table, *[None] * 4, descale, *[None] * 4]
    kwargs = dict(softmax_scale=0.07, kv_format=name, head_dim_v=kind.head_dim_v)
    lse = torch.empty(2, 4, 1).transpose(1, 2)
    found = saved(call_of("decode", args, kwargs, (torch.empty(2, 1, 4, kind.head_dim_v), lse)), folder)
    assert (found.op, found.sentence, found.backend, found.device) == ("decode", "a report", "reference", "cpu")
    tensors = [saved_call.tensor(each, CPU) for each in found.tensors]
    for at, (made, given) in enumerate(zip(tensors, args, strict=True)):
        if at != 1:
            assert_same(made, given)
    read = [2, 4, 8]
    assert found.tensors[1]["pages"].tolist() == read
    assert tensors[1].stride() == cache.stride()
    assert torch.equal(bits(tensors[1][read]), bits(cache[read]))
    assert not bits(tensors[1][[0, 1, 3, 5, 6, 7]]).any()
    assert saved_call.tensor(found.outputs[1], CPU).stride() == lse.stride()
    ran = check_mode.Call(register.get("decode"), (), tuple(tensors), found.options).record
    assert ran.softmax_scale == 0.07
    expected, got = (
        register.get("decode").backends[-1].run(None, outputs := (torch.empty(2, 1, 4, kind.head_dim_v), lse), record)
        or outputs[0]
        for record in (ran, call_of("decode", args, kwargs).record)
    )
    assert torch.equal(expected, got)


def test_lists_dtypes_and_what_is_written(folder):
    """A cache that a call writes is saved by its sizes alone."""
    kv_c, k_pe = torch.randn(2, 512), torch.randn(1, 64).expand(2, 64)
    cache = torch.ones(1 << 8, 64, 576, dtype=torch.bfloat16)
    found = saved(
        call_of("append_kv", [kv_c, k_pe, cache, torch.tensor([5, 9]), None, None, None], dict(kv_format="bf16")),
        folder,
    )
    (file,) = folder.iterdir()
    assert file.stat().st_size < 20_000
    made = [saved_call.tensor(each, CPU) for each in found.tensors]
    assert made[2].shape == cache.shape
    assert not made[2][0].any()
    assert torch.equal(made[1], k_pe)
    assert found.options == ("bf16", True)


def test_every_sample_comes_back(folder):
    for op in register.registry().values():
        for sample in op.samples():
            if sample.bytes < 5e6:
                args, kwargs = sample.make(CPU)
                call = call_of(op.name, [*args, *op.functional.positional[len(args) :]], kwargs)
                made = saved(call, folder)
                again = check_mode.Call(
                    op, (), tuple(saved_call.tensor(one, CPU) for one in made.tensors), made.options
                )
                assert op.describe(again.record) == op.describe(call.record)
                for file in folder.iterdir():
                    file.unlink()
                saved_call._numbers = itertools.count()


def test_a_cache_may_be_larger_than_the_memory_of_the_machine_that_replays():
    last = 2**30 - 1  # of pages of 1,024 bytes
    values = torch.arange(2048).view(2, 1, 1024).to(torch.uint8)
    content = dict(shape=[last + 1, 1, 512], strides=[512, 512, 1], dtype="bfloat16", offset=0, values=values)
    made = saved_call.tensor(content | dict(pages=torch.tensor([1, last])), torch.device("cpu"))
    assert torch.equal(made[[1, last]].view(torch.uint8), values)
    assert not made[2].any()


def test_files_are_few_and_of_bounded_size(small, folder, monkeypatch):
    for _ in range(saved_call.MAX_FILES):
        assert save(small).startswith("run it again")
    assert save(small) == "it is not saved, since this process has saved 8 calls"
    assert len(list(folder.iterdir())) == saved_call.MAX_FILES
    monkeypatch.setattr(saved_call, "_numbers", itertools.count())
    monkeypatch.setattr(saved_call, "MAX_BYTES", 10_000)
    assert "bytes and a file at most 10000" in save(small)
    assert len(list(folder.iterdir())) == saved_call.MAX_FILES


def test_a_write_that_fails_leaves_nothing_and_is_a_sentence(small, folder):
    """As on a full disk, after some of the file is written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        said = save(small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said == "it is not saved: [Errno 27] File too large"
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_is_a_sentence(small, folder):
    folder.write_text("a file")
    assert save(small).startswith("it is not saved: [Errno 17] File exists: ")


def test_without_a_folder_it_is_one_that_nobody_else_enters(small, monkeypatch):
    monkeypatch.delenv("MLA_SUITE_CHECK_DIR")
    file = Path(save(small).rpartition(" ")[2])
    assert file.parent.name.startswith("mla_suite_check_")
    assert file.parent.stat().st_mode & 0o077 == 0
    file.unlink()


def raiser(error):
    def fails(*_):
        raise error

    return fails


def test_a_file_that_is_none_and_a_call_that_only_the_reference_takes(small, folder, capsys, monkeypatch):
    outputs = tuple(torch.empty(each.shape, dtype=each.dtype) for each in small.op.check(small.record))
    saved(small._replace(outputs=outputs), folder)
    (file,) = folder.iterdir()
    for words, sentence in (
        ([str(folder / "none.pt")], "No such file or directory"),
        ([str(file)], "only the reference takes this call here"),
        ([str(file), "--backend", "native"], "`--emulate ARCH` or a GPU runs its kernels"),
        ([str(file), "--emulate", "sm_90"], "emulate: sm_90 is not emulated"),
    ):
        assert main(["replay", *words]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["replay", str(file), "--backend", "reference"]) == 0
    with monkeypatch.context() as context:
        context.setattr(saved_call, "_zeros", raiser(torch.OutOfMemoryError("73 GB")))
        assert main(["replay", str(file)]) == 2
    assert "replay: the call's tensors do not fit the memory of this machine: 73 GB" in capsys.readouterr().err
    torch.save({"version": 0}, file)
    assert main(["replay", str(file)]) == 2
    assert "is no call that check mode saved" in capsys.readouterr().err
    file.write_bytes(b"nothing")
    assert main(["replay", str(file)]) == 2
    error = capsys.readouterr().err
    assert error == f"replay: {file} cannot be read: it is no call that check mode saved, or damaged\n"
