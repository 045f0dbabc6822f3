"""The decode loop of a server: one plan per step for all layers, captured in a CUDA graph, replayed as lengths grow.

    python examples/paged_decode_graph.py        without a GPU it runs the same step without capturing it

A captured plan stays right at every length up to max_seqlen_kv: its work tiles end where seq_lens says when it runs.
"""

import torch

import mla_suite

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, HEADS, PAGE, PAGES_PER_SEQUENCE, LAYERS = 4, 16, 64, 8, 2
MAX_KV = PAGE * PAGES_PER_SEQUENCE

caches = [
    torch.zeros(BATCH * PAGES_PER_SEQUENCE, PAGE, 576, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)
]
order = torch.randperm(BATCH * PAGES_PER_SEQUENCE, device=device).to(torch.int32)
block_table = order.view(BATCH, PAGES_PER_SEQUENCE)
seq_lens = torch.tensor([5, 64, 65, 200], dtype=torch.int32, device=device)
q = torch.randn(LAYERS, BATCH, 1, HEADS, 576, device=device).bfloat16()
new_latents = torch.randn(LAYERS, BATCH, 512, device=device).bfloat16()
new_k_pe = torch.randn(LAYERS, BATCH, 64, device=device).bfloat16()
out = torch.empty(LAYERS, BATCH, 1, HEADS, 512, device=device, dtype=torch.bfloat16)


def step() -> None:
    """Writes one token per sequence and attends, all on the device: nothing here reads a length on the host."""
    seq_lens.add_(1)
    position = (seq_lens - 1).long()
    pages = block_table.gather(1, (position // PAGE)[:, None])[:, 0].long()
    slots = pages * PAGE + position % PAGE
    plan = mla_suite.plan(seq_lens, num_heads=HEADS, max_seqlen_kv=MAX_KV)
    for layer, cache in enumerate(caches):
        mla_suite.append_kv(new_latents[layer], new_k_pe[layer], cache, slots, kv_format="bf16")
        out[layer] = mla_suite.decode(
            q[layer], cache, seq_lens, block_table, plan=plan, softmax_scale=192**-0.5, max_seqlen_kv=MAX_KV
        )[0]


with torch.inference_mode():
    run = step
    if device.type == "cuda":
        start = seq_lens.clone()
        step()  # loads kernels and grows scratch memory before anything is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        seq_lens.copy_(start)
        run = graph.replay
    for _ in range(10):
        run()
print("lengths after ten steps:", seq_lens.tolist())
