"""vLLM's OpenAI-compatible server decodes through our backend on a CPU, and answers over HTTP: `tox -e vllm`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import http_server
import installed_plugins
import tiny_deepseek
import vllm_cpu
import vllm_engine_plugin

LENGTHS = [5, 40, 17, 33]
LAYERS, NEW_TOKENS = tiny_deepseek.LAYERS, tiny_deepseek.NEW_TOKENS


def server(model, folder):
    """The server's address, while it runs. `folder` gets its log and the counts of calls."""
    options = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--max-model-len": str(tiny_deepseek.MAX_LEN),
        "--attention-backend": "CPU_MLA",
        "--gpu-memory-utilization": "0.05",  # the name is for CPUs as well
        "--compilation-config": json.dumps(vllm_cpu.COMPILATION),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init", "--enforce-eager"]
    command += [text for option in options.items() for text in option]
    return http_server.running(command, vllm_engine_plugin.environment(folder), folder)


def test_completions_over_http(tmp_path):
    """Requests that arrive together, then one that streams, give the tokens of transformers."""
    model = tiny_deepseek.save_model(tmp_path / "model")
    batch = tiny_deepseek.prompts(LENGTHS)
    expected = [tiny_deepseek.greedy(model, prompt) for prompt in batch]
    with server(tmp_path / "model", tmp_path) as address:
        ask = partial(http_server.complete, address, max_tokens=NEW_TOKENS, detokenize=False)
        with ThreadPoolExecutor(len(batch)) as clients:
            assert list(clients.map(ask, batch)) == expected
        assert ask(batch[0], stream=True) == expected[0]
    (calls,) = installed_plugins.calls(tmp_path)
    assert len(calls) >= 2 * LAYERS * (NEW_TOKENS - 1)
