"""benchmarks/bench_vllm.py server makes its table of rounds and reads servers' logs; tests/servers runs all of it."""

from dataclasses import asdict

import pytest
import vllm_server
from vllm_server import Load

LINE = "decode DecodeProblem(batch=32, heads=128) on {} -> {}: kvsource_tma\n"


def row(backend, load, tokens_per_s, turn=0):
    times = dict.fromkeys(vllm_server.FIELDS, 1.0) | {"tokens_per_s": tokens_per_s}
    return {"backend": backend, **asdict(load), "round": turn, **times}


def server(folder, backend, log):
    path = folder / f"{backend}.log"
    path.write_text(log)
    return vllm_server.Server(backend, rounds=3, process=None, port=0, log=path)


def test_the_table_has_medians_and_ratios_by_load():
    small, large = Load(32, 1024, 256), Load(128, 1024, 256)
    peer = vllm_server.AGAINST
    rows = [row(peer, small, 100.0), row(peer, large, 400.0)]
    rows += [row("CUSTOM", small, rate, turn) for turn, rate in enumerate((120.0, 900.0, 110.0))]
    found = list(vllm_server.summary(rows))
    assert [(row["backend"], row["concurrency"], row["tokens_per_s"], row["ratio"]) for row in found] == [
        (peer, 32, 100.0, 1.0),
        (peer, 128, 400.0, 1.0),
        ("CUSTOM", 32, 120.0, 1.2),
    ]


def test_a_load_takes_whole_pages_and_one_more_of_each_sequence():
    assert Load.parse("2x63x1") == Load(2, 63, 1)
    assert (Load(2, 63, 1).pages, Load(2, 64, 1).pages) == (4, 6)


@pytest.mark.parametrize(
    ("ours", "theirs", "status"),
    [
        (LINE.format("sm_90", "native"), "", 0),
        ("", "", 1),  # a server that fell back to another backend
        (LINE.format("sm_90", "native"), LINE.format("sm_90", "native"), 1),  # ours behind another's name
    ],
)
def test_decode_has_to_run_in_our_server_alone(tmp_path, capsys, ours, theirs, status):
    servers = [server(tmp_path, "CUSTOM", ours), server(tmp_path, "FLASHMLA", theirs)]
    assert vllm_server.check(servers, on_gpu=False) == status
    said = capsys.readouterr().out
    assert ("CUSTOM: our decode was native on sm_90\n" in said) == bool(ours)


def test_graphs_have_to_be_captured_on_a_gpu(tmp_path, capsys):
    captured = f"INFO {vllm_server.CAPTURED} in 3 secs, took 0.50 GiB\n"
    with_graphs = server(tmp_path, "CUSTOM", LINE.format("sm_90", "native") + captured)
    without = server(tmp_path, "FLASHMLA", "")
    assert vllm_server.check([with_graphs], on_gpu=True) == 0
    assert vllm_server.check([with_graphs, without], on_gpu=True) == 1
    assert "FLASHMLA: our decode did not run, without CUDA graphs" in capsys.readouterr().out


def test_no_prompt_is_longer_than_its_words_could_make_it(tmp_path):
    """vLLM refuses a prompt of more characters than as many of the longest words have."""
    from transformers import AutoTokenizer

    model = vllm_server.save_model(tmp_path, layers=1, heads=2, loads=[Load(1, 4096, 256)])
    words = AutoTokenizer.from_pretrained(model).get_vocab()
    longest = max(len(word) for word in words)
    assert longest > len("w8191 ")
    assert sorted(words.values()) == list(range(len(words)))
