"""Programs of benchmarks/ on a CPU: what they print and save."""

import csv
import json
import re

import bench_check
import bench_flashmla
import pytest
from built import require_built

import mla_suite
from mla_suite.bench import environment
from mla_suite.core import check_mode


@pytest.fixture
def start(monkeypatch):
    """start(program, words): its main with these words, on a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def start(program, *words):
        monkeypatch.setattr("sys.argv", [f"{program.__name__}.py", *words])
        return program.main()

    return start


def test_check_mode_is_timed_for_each_n(start, monkeypatch, capsys, tmp_path):
    require_built("gfx942")
    checked = []
    usual = check_mode.difference
    monkeypatch.setattr(check_mode, "difference", lambda call, config: checked.append(call) or usual(call, config))
    monkeypatch.setattr(bench_check, "ROUNDS", 1)
    saved = tmp_path / "times.json"
    start(bench_check, "--kv", "20", "--every", "1", "3", "--save", str(saved))
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[:3]] == ["0", "1", "3"]
    assert re.fullmatch(r"a call that is not checked: -?\d+\.\d us more", printed[3])
    assert len(checked) == 5 + 2  # of 5 calls each
    assert list(json.loads(saved.read_text())["ms_per_call"]) == ["0", "1", "3"]


@pytest.mark.parametrize(
    ("given", "checkout", "named"),
    [("", "89abcde", "89abcde"), ("1234567", "89abcde", "1234567"), ("1234567", "", "1234567"), ("", "", "unknown")],
)
def test_a_saved_run_beside_flashmla_names_its_commit(monkeypatch, given, checkout, named):
    monkeypatch.setattr(environment, "_commit", lambda: {"commit": checkout, "changed": False})
    assert bench_flashmla.environment(given, "cpu")["commit"] == named


@pytest.mark.parametrize("wrong", [False, True])
def test_hugging_face_models_are_timed_where_their_logits_agree(wrong, start, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    import bench_transformers

    decode = mla_suite.decode
    doubled = lambda *args, **kwargs: tuple(2 * tensor for tensor in decode(*args, **kwargs))  # noqa: E731
    monkeypatch.setattr(mla_suite, "decode", doubled if wrong else decode)
    monkeypatch.setattr(bench_transformers, "STEPS", 2)
    table = tmp_path / "lines.csv"
    sizes = "--layers 1 --hidden 128 --heads 4 --intermediate 256 --batch 2 --context 300 --modes eager"
    words = *sizes.split(), "--csv", str(table)
    if wrong:
        with pytest.raises(AssertionError, match="patched, eager: logits are off by"):
            start(bench_transformers, *words)
        return
    start(bench_transformers, *words)
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert [(line["model"], line["mode"]) for line in lines] == [("unpatched", "eager"), ("patched", "eager")]
    assert 0 < float(lines[1]["error"]) < bench_transformers.CLOSE
    assert all(float(line["ms"]) > 0 and line["context"] == "300" for line in lines)
