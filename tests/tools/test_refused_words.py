"""What a program of tools/ or benchmarks/ cannot do is refused in a sentence, before it measures, counts or writes."""

import inspect
import sys

import bench_aiter_3003
import bench_check
import bench_flashmla
import bench_reduce
import check_hazards
import compare_amd_peers
import counted_search
import measure_amd
import pytest

NO_FILE = ". cannot be written; name a file in a folder of yours"
NOT_EMULATED = "sm_90 is not emulated; the emulator executes gfx942 and gfx950"
WORDS = [
    (bench_aiter_3003, "--accuracy --ctx-lens 8", "--accuracy takes --batch-sizes and --ctx-lens together, or neither"),
    (bench_check, "--every 0", "argument --every: '0'; it takes a whole number of 1 or more"),
    (bench_check, "--emulate sm_90", NOT_EMULATED),
    (bench_check, "--save .", NO_FILE),
    (bench_flashmla, "--report absent.json", "absent.json is no run that --save wrote: FileNotFoundError"),
    (bench_flashmla, "--report other.json", "other.json is no run that --save wrote: KeyError: 'rows'"),
    (bench_flashmla, "--plot dense.svg", "--plot draws a saved run: name it with --report"),
    (bench_flashmla, "--save .", NO_FILE),
    (bench_reduce, "--shapes b3-", "no shape contains b3-"),
    (bench_reduce, "--arch gfx942,sm_90", NOT_EMULATED),
    (bench_reduce, "--arch gfx999", "unknown arch 'gfx999'"),
    (bench_reduce, "--runners ours,nope", "no runner nope; there are stock, "),
    (bench_reduce, "--sizes 1x2", "argument --sizes: invalid"),
    (bench_reduce, "--csv .", NO_FILE),
    (
        check_hazards,
        "--disassembly x.s",
        "--disassembly needs --arch, gfx942 or gfx950: the texts do not say",
    ),
    (check_hazards, "--disassembly x.s --kernel plan", "names the texts themselves: leave --kernel and --objects out"),
    (check_hazards, "--arch gfx942 --disassembly nowhere.s", "a text cannot be read: "),
    (check_hazards, "--objects nowhere", "nowhere"),
    (check_hazards, "--kernel no_such_kernel", "no AMD kernel of that arch and name was built"),
    (compare_amd_peers, "--source aiter", "the sources are aiter-2039, aiter-3003"),
    (counted_search, "gfx942,sm_90", NOT_EMULATED),
    (counted_search, "gfx942 --set nope", "nope"),
    (counted_search, "gfx942 --shapes nope", "nope"),
    (measure_amd, "numbers.json", "--dry gfx942 goes through the steps without one"),
    (measure_amd, ". --dry gfx942", NO_FILE),
    (measure_amd, "numbers.json --dry sm_90", NOT_EMULATED),
    (measure_amd, "numbers.json --dry gfx999", "unknown arch 'gfx999'"),
]
BEGINS = {bench_check: "seconds", bench_flashmla: "run", counted_search: "search", measure_amd: "measure"}


@pytest.mark.parametrize(("program", "words", "says"), WORDS, ids=lambda given: getattr(given, "__name__", given))
def test_what_cannot_be_done_is_refused_before_it_begins(program, words, says, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.json"
    other.write_text("{}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [program.__name__, *words.split()])
    if program in BEGINS:
        monkeypatch.setattr(program, BEGINS[program], lambda *given: pytest.fail("it began"))
    given = [words.split()] if inspect.signature(program.main).parameters else []
    with pytest.raises(SystemExit, match="2"):
        program.main(*given)
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out
    assert list(tmp_path.iterdir()) == [other]
