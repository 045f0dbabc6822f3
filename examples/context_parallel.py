"""Context parallelism: ranks share out the keys of each sequence, and a decode step merges what each of them finds.

torchrun --nproc-per-node 2 examples/context_parallel.py        on GPUs with NCCL where there is one for each rank of
                                                                this host, else on the CPU with gloo
"""

import os
import sys

import torch
import torch.distributed as dist

from mla_suite.distributed import ContextParallelCache, Parallel, ParallelMLA
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

if not dist.is_torchelastic_launched():
    print("start it with torchrun: torchrun --nproc-per-node 2 examples/context_parallel.py", file=sys.stderr)
    sys.exit(2)
on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)

torch.manual_seed(0)  # the same weights and inputs on every rank
config = MLAConfig.tiny()
whole = MLA(config, dtype=torch.bfloat16, device=device).requires_grad_(False)
for parameter in whole.parameters():
    parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
layer = ParallelMLA(
    config,
    Parallel.create(cp_size=dist.get_world_size(), device_type=device.type),
    interleave=16,  # whole pages are dealt to the ranks in turn
    dtype=torch.bfloat16,
    device=device,
).requires_grad_(False)
layer.load_full_weights(whole.state_dict())  # each rank takes its heads

prompts = [70, 3, 129]
cos_sin = cos_sin_table(config, 256, device)
own = ContextParallelCache(1, num_pages=16, page_size=16, shard=layer.shard, device=device)
full = PagedLatentCache(1, num_pages=16, page_size=16, device=device)  # what one GPU would hold, to compare with
x = torch.randn(sum(prompts), config.hidden_size).to(device, torch.bfloat16)
sequences = {}
for cache, prefill in ((own, layer.prefill), (full, whole.prefill)):
    sequences[cache] = [cache.allocate() for _ in prompts]
    prefill(x, cos_sin, cache.layers[0], cache.append(sequences[cache], prompts), q_lens=prompts)

with torch.inference_mode():
    for _ in range(4):
        x = torch.randn(3, 1, config.hidden_size).to(device, torch.bfloat16)
        y = layer.decode(x, own.layers[0], own.append(sequences[own], [1, 1, 1]), cos_sin)
        expected = whole.decode(x, full.layers[0], full.append(sequences[full], [1, 1, 1]), cos_sin)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
if dist.get_rank() == 0:
    print("four steps over", dist.get_world_size(), "ranks, equal to one; pages left of 16:", own.free_pages)
dist.destroy_process_group()
