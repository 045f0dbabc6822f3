"""Processes of vLLM that find our backend as an installed package, and write down what reached our decode.

usage: python vllm_engine_plugin.py CHECKPOINT PROMPTS SETTINGS

As a program it runs an engine with two worker processes. PROMPTS and SETTINGS are JSON, as are the tokens it prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import installed_plugins
import torch


def environment(folder: Path) -> dict[str, str]:
    """Variables for a process in which this package is installed, by an entry of `folder` that names its plugins."""
    # On a CPU vLLM ignores CUSTOM, so a second function puts the registered class behind the name it does not ignore.
    variables = installed_plugins.install(folder, "vllm.general_plugins", on_cpu="vllm_engine_plugin:on_cpu")
    return {**variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def on_cpu() -> None:
    """Entry point: put the class that is registered as CUSTOM behind CPU_MLA, and write its calls to a file."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.CUSTOM.get_path())
    from mla_suite.integrations.vllm import MLASuiteImpl

    if hasattr(MLASuiteImpl, "counted"):
        return
    MLASuiteImpl.counted, forward = True, MLASuiteImpl.forward_mqa

    def counted(self, q, cache, metadata, layer):
        lens = metadata.query_start_loc[: metadata.num_decodes + 1].diff().tolist()
        own = metadata.decode.seq_lens.tolist()
        installed_plugins.write_call(query_tokens=lens, own_keys=own, ranks=self.dcp_world_size)
        return forward(self, q, cache, metadata, layer)

    MLASuiteImpl.forward_mqa = counted
    context_parallel_on_cpu()


def context_parallel_on_cpu() -> None:
    """Two kernels of decode context parallelism that vLLM has in Triton alone, with vLLM's arithmetic in torch."""
    from vllm.v1.attention.ops import dcp
    from vllm.v1.worker.block_table import BlockTable

    def compute_slot_mapping(self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
        ranks, interleave, page = self.dcp_world_size, self.cp_kv_cache_interleave_size, self.block_size
        owner = torch.repeat_interleave(torch.arange(num_reqs), query_start_loc[: num_reqs + 1].diff())
        positions = positions[: len(owner)]
        pages = self.block_table.gpu[owner, positions // (page * ranks)]
        offset = positions % (page * ranks)
        local = offset // (ranks * interleave) * interleave + offset % interleave
        here = offset // interleave % ranks == self.dcp_rank
        self.slot_mapping.gpu.fill_(-1)
        self.slot_mapping.gpu[: len(owner)] = torch.where(here, pages * page + local, -1)

    def correct_attn_out(out: torch.Tensor, lses: torch.Tensor, rank: int, *_: Any, is_lse_base_on_e: bool) -> Any:
        assert is_lse_base_on_e
        total = lses.logsumexp(0)
        weight = (lses[rank] - total).nan_to_num(nan=-torch.inf).exp()
        return out * weight[..., None], total

    BlockTable.compute_slot_mapping = compute_slot_mapping
    dcp.correct_attn_out = correct_attn_out


def main() -> None:
    import vllm_cpu

    folder, batch, settings = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    with vllm_cpu.engine(folder, ours=False, tensor_parallel_size=2, **settings) as llm:
        tokens, _ = vllm_cpu.generate(llm, batch)
    print(json.dumps(tokens))


if __name__ == "__main__":
    main()
