"""SGLang's own server with a tiny DeepSeek-V3 on a CPU, and our backend as an installed package.

usage: python sglang_server.py OPTION ...

As a program it is `sglang serve`. The scheduler, which SGLang starts in a new process, reads
this file first and so finds the stand-ins.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import http_server
import installed_plugins
import requests
import sglang_cpu  # before SGLang
import tiny_deepseek
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

SHAPE = {
    # SGLang's engine for CPUs has this rotary embedding alone.
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "moe_layer_freq": 1,  # SGLang asks for what transformers implies
    "num_nextn_predict_layers": 1,
}
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "mla_suite",
    "page_size": 64,
    "context_length": tiny_deepseek.MAX_LEN,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "mem_fraction_static": 0.5,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "log_level": "warning",
    "skip_server_warmup": True,
}
EMBEDDING_SCALE = 64.0
"""Large embeddings make the next token depend on the last one above all, so that some drafts are right."""


def save_model(folder: Path, **changes: Any) -> Any:
    """Write a checkpoint of a model and of a layer that drafts for it; return transformers' model."""
    model = tiny_deepseek.save_model(folder, **SHAPE, **changes)
    file = folder / "model.safetensors"
    weights = load_file(file)
    layers, hidden = tiny_deepseek.LAYERS, tiny_deepseek.SHAPE["hidden_size"]
    weights["model.embed_tokens.weight"] *= EMBEDDING_SCALE
    model.model.embed_tokens.weight.data *= EMBEDDING_SCALE
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, draft)] = weights[name].clone()
    weights[f"{draft}enorm.weight"] = torch.full((hidden,), 0.1 * EMBEDDING_SCALE)
    weights[f"{draft}hnorm.weight"] = torch.ones(hidden)
    weights[f"{draft}eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    weights[f"{draft}shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    weights[f"{draft}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{draft}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a word for each token, which OpenAI's API of this server needs."""
    words = {f"t{token}": token for token in range(tiny_deepseek.VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t0", eos_token="t1")
    fast.save_pretrained(folder)


def count_calls() -> None:
    """Entry point: write the shape of each call of our decode to a file of the process."""
    import mla_suite

    decode = mla_suite.decode

    def counted(q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, *args: Any, **options: Any) -> Any:
        starts = options["cu_seqlens_q"]
        lens = [q.shape[1]] * len(q) if starts is None else starts.diff().tolist()
        tree = {} if options["tree_mask"] is None else {"tree": options["tree_mask"].tolist()}
        split_size = options["split_size"]
        installed_plugins.write_call(query_tokens=lens, keys=seq_lens.tolist(), split_size=split_size, **tree)
        return decode(q, kv_cache, seq_lens, *args, **options)

    mla_suite.decode = counted


def server(
    checkpoint: Path,
    folder: Path,
    plugins: Mapping[str, str] = MappingProxyType({}),
    variables: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> contextlib.AbstractContextManager[str]:
    """The address of a server, while it runs. `folder` gets its log and the calls that reach our decode.

    `plugins` and `variables` are for its processes, beside those that every server on a CPU has.
    """
    given = {**OPTIONS, **options, "model_path": checkpoint}
    command = [sys.executable, __file__]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    own = {"on_cpu": "sglang_cpu:use_triton", "counting": "sglang_server:count_calls"}
    installed = installed_plugins.install(folder, "sglang.srt.plugins", **own, **plugins)
    return http_server.running(command, {**installed, **sglang_cpu.ENGINE, **variables}, folder)


def generate(
    address: str, batch: list[list[int]], new_tokens: int = tiny_deepseek.NEW_TOKENS
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Greedy tokens of each prompt, and what SGLang says about each."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": batch, "sampling_params": sampling}
    reply = requests.post(f"{address}/generate", json=body, timeout=600)
    assert reply.ok, reply.text
    answers = reply.json()
    return [answer["output_ids"] for answer in answers], [answer["meta_info"] for answer in answers]


if __name__ == "__main__":
    from sglang.cli.main import main

    sys.argv[1:1] = ["serve"]
    main()
