"""What served models ask for, each call beside what it is compared with, in pairs of graph replays.

    python benchmarks/bench_served.py [--part trees] [--part records ...] [--pairs 30] [--csv FILE]

trees    a tree of drafts beside the causal mask, and a chain's tree
windows  a window of 512 of 32,768 keys beside 512 keys
widths   narrow latents beside the same model's latents padded to 512 + 64
mixed    a prompt of 8 tokens among single tokens: a sequence for each token beside the batch as it is
prompts  a short prompt behind cached keys: decode beside gathering the keys, expanding them and cuDNN's attention
records  V4's window of 128 and 512 entries: 528 and 288 + 528 bytes beside 584, and FlashMLA if it is installed
hca      the same window and 8,192 entries, 64 heads
fp8      2,048 keys of bare fp8 rows beside V3.2's records
bf16     the same of bf16 rows, which vLLM keeps for V3.2 unless it is told otherwise
widened  a prompt over V3.2's records: these turned into bf16 first, beside selecting from them
convert  convert_kv of 65,536 tokens beside a copy of as many bytes
append   append_kv of V4.1's records beside a copy of as many bytes

A row has microseconds of the call and of the other, medians, and the median of the pairs' ratios. Inputs rotate
through more memory than the L2 holds. Results are checked by tests/gpu, not here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch
from served_rows import DEVICE, TOKENS, Row, descale_of, pool, queries, turns_for
from served_selections import bf16, fp8, hca, records, widened
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import mla_suite
from mla_suite.bench import environment, inputs, sets
from mla_suite.bench.saving import Table
from mla_suite.bench.timer import Replay
from mla_suite.cli import writable
from mla_suite.integrations import by_token
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

CONVERTED = (
    *(("v41", "dsv4"), ("dsv4", "v41_vllm"), ("v41", "v32_nope"), ("v32_nope", "v41"), ("dsv4", "v32_nope")),
    *(("dsv4_fnuz", "dsv4"), ("v41", "dsv4_fnuz"), ("v41_fp4", "v41"), ("v41_fp4", "dsv4"), ("v32", "v32_pow2")),
    *(("dsv4", "v41_fp4"), ("v32_nope", "v41_fp4"), ("v41_vllm", "v41_fp4_interleaved"), ("bf16", "v41_fp4")),
    *(("bf16", "v32"), ("v32", "bf16"), ("bf16", "v41"), ("v41", "bf16"), ("v41_fp4", "bf16"), ("bf16", "fp8_fnuz")),
)


def with_cache(q: list[torch.Tensor], cache: torch.Tensor, tables: list[torch.Tensor]) -> list[Any]:
    return [(own, cache, table) for own, table in zip(q, tables, strict=True)]


def block_tables(count: int, pages: int, batch: int, width: int) -> list[torch.Tensor]:
    return [torch.randint(pages, (batch, width), dtype=torch.int32, device=DEVICE) for _ in range(count)]


def dense(batch: int, heads: int, q_len: int, kv: int, page: int, planned: bool, **options: Any) -> Any:
    """A call of decode of a turn's queries, cache and table; `tree_mask` and `window_left` are options."""
    seq_lens = torch.full((batch,), kv, dtype=torch.int32, device=DEVICE)
    sizes: dict[str, Any] = {"max_seqlen_q": q_len, "max_seqlen_kv": kv}
    window: dict[str, Any] = {name: options[name] for name in ("window_left",) if name in options}
    plan = mla_suite.plan(seq_lens, num_heads=heads, **sizes, **window) if planned else None

    def call(turn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> object:
        q, cache, table = turn
        return mla_suite.decode(q, cache, seq_lens, table, plan=plan, softmax_scale=576**-0.5, **sizes, **options)

    return call


def trees(kv: int = 4096) -> Iterator[Row]:
    cache = torch.randn(4096, 64, 576, device=DEVICE).bfloat16()
    for batch, heads, q_len in ((1, 16, 8), (8, 16, 8), (32, 16, 8), (32, 128, 4), (128, 16, 4)):
        for planned in (False, True):
            count = turns_for(batch * kv * 1152)
            q = queries(count, batch, q_len, heads, 576)
            turns = with_cache(q, cache, block_tables(count, 4096, batch, kv // 64))
            drafts = torch.arange(q_len, device=DEVICE)
            chain = (2 << drafts) - 1
            tree = torch.where(drafts % 2 == 1, chain, chain & ~2)  # draft 2i does not see draft 1
            tree[0] = 1
            causal = dense(batch, heads, q_len, kv, 64, planned)
            name = f"B{batch} H{heads} q{q_len}{' planned' if planned else ''}"
            for kind, mask in (("tree", tree), ("chain", chain)):
                own = dense(batch, heads, q_len, kv, 64, planned, tree_mask=mask.expand(batch, -1).contiguous())
                yield Row(f"{kind} of {name} beside causal", own, causal, turns, turns)


def windows(kv: int = 32768) -> Iterator[Row]:
    for page in (1, 64):
        pages = TOKENS // page
        cache = torch.randn(pages, page, 576, device=DEVICE).bfloat16()
        for batch in (1, 32, 128):
            for heads in (16, 128):
                count = min(turns_for(batch * 512 * 1152), 32)
                q = queries(count, batch, 1, heads, 576)
                long, short = (block_tables(count, pages, batch, keys // page) for keys in (kv, 512))
                own = dense(batch, heads, 1, kv, page, True, window_left=511)
                other = dense(batch, heads, 1, 512, page, True)
                name = f"window of 512, B{batch} H{heads}, pages of {page}, beside 512 keys"
                turns, other_turns = (with_cache(q, cache, tables) for tables in (long, short))
                yield Row(name, own, other, turns, other_turns)


def widths(batch: int = 128, heads: int = 32, kv: int = 4096) -> Iterator[Row]:
    def turns_of(latent: int, rope: int, types: Mapping[str, Any]) -> list[inputs.Call]:
        case = sets.decode(batch, heads, kv, planned=True, latent=latent, rope=rope, **types)
        return inputs.rotation(inputs.make(case, torch.device(DEVICE)), turns_for(case.sample.bytes))

    def call(turn: inputs.Call) -> object:
        return torch.ops.mla_suite.decode(*turn.args, **turn.kwargs)

    for cache, types in (("bf16", {}), ("e4m3", {"kv_format": "fp8", "dtype": torch.float8_e4m3fn})):
        padded = turns_of(512, 64, types)
        for latent, rope in ((512, 0), (256, 64), (256, 32), (128, 32)):
            name = f"{latent} + {rope} in {cache}, B{batch} H{heads} kv {kv}, beside padded"
            yield Row(name, call, call, turns_of(latent, rope, types), padded)


def batch_call(batch: by_token.Batch, heads: int) -> Any:
    """A planned call of decode of a turn's packed queries and cache."""
    seq_lens, table, cu_seqlens_q, max_seqlen_q = batch
    plan = mla_suite.plan(seq_lens, num_heads=heads, max_seqlen_q=max_seqlen_q)
    options: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}

    def call(turn: tuple[torch.Tensor, torch.Tensor]) -> object:
        q, cache = turn
        shaped = q if cu_seqlens_q is not None else q.unsqueeze(1)
        return mla_suite.decode(shaped, cache, seq_lens, table, plan=plan, softmax_scale=576**-0.5, **options)

    return call


def mixed(kv: int = 4096, prompt: int = 8) -> Iterator[Row]:
    for batch, heads in ((32, 16), (32, 128), (128, 16), (128, 128)):
        count = turns_for(batch * kv * 1152)
        caches_of_turns = torch.randn(count, batch * kv // 64, 64, 576, device=DEVICE, dtype=torch.bfloat16)
        lens = torch.full((batch,), kv, dtype=torch.int32, device=DEVICE)
        table = torch.randperm(batch * kv // 64, device=DEVICE).int().view(batch, -1)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
        starts[1:] += prompt - 1
        tokens = batch + prompt - 1
        given = by_token.Batch(lens, table, starts, prompt)
        q = torch.randn(count, tokens, heads, 576, device=DEVICE, dtype=torch.bfloat16)
        turns = list(zip(q, caches_of_turns, strict=True))
        apart = by_token.arranged(given, tokens, heads)
        name = f"{prompt} tokens of one and 1 of {batch - 1} sequences, H{heads}, apart beside together"
        yield Row(name, batch_call(apart, heads), batch_call(given, heads), turns, turns)


def expanded(heads: int, tokens: int, context: int) -> Any:
    """A call that attends to the keys of a turn's pages as prefill does, each expanded to every head's 192 and 128."""
    weight = torch.randn(512, heads * 256, device=DEVICE, dtype=torch.bfloat16) / 512**0.5
    q = torch.randn(1, heads, tokens, 192, device=DEVICE, dtype=torch.bfloat16)

    def call(turn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> object:
        _, cache, table = turn
        rows = cache.index_select(0, table[0, : context // 64]).view(context, 576)
        key, value = (rows[:, :512] @ weight).view(context, heads, 256).split(128, dim=-1)
        rotated = rows[:, None, 512:].expand(-1, heads, -1)
        keys, values = (part.transpose(0, 1)[None] for part in (torch.cat((key, rotated), dim=-1), value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q, keys, values)

    return call


def prompts() -> Iterator[Row]:
    """The other side leaves out the prompt's own keys, and the products that expand them are those of absorption."""
    for heads in (128, 16):
        for context in (1024, 4096, 16384):
            for tokens in (16, 64, 128, 256, 512):
                count = turns_for(context * 1152)
                cache = torch.randn(count * (context // 64 + 8), 64, 576, device=DEVICE).bfloat16()
                tables = torch.randperm(len(cache), device=DEVICE).int().view(count, 1, -1).unbind()
                turns = with_cache(queries(count, 1, tokens, heads, 576), cache, list(tables))
                own = dense(1, heads, tokens, context + tokens, 64, planned=False)
                name = f"{tokens} tokens of {heads} heads behind {context} keys, absorbed beside expanded"
                yield Row(name, own, expanded(heads, tokens, context), turns, turns)


def beside_copy(name: str, call: Any, turns: list[Any], size: int) -> Row:
    """A copy reads and writes `size` bytes together."""
    buffers = [torch.empty(2, size // 2, dtype=torch.uint8, device=DEVICE) for _ in turns]
    return Row(f"{name} beside a copy", call, lambda buffer: buffer[1].copy_(buffer[0]), turns, buffers)


def bytes_of(kv_format: str, head_dim: int) -> int:
    kind = get_kv_format(kv_format)
    return head_dim * kind.element_bytes if kind.dense else kind.token_bytes


def convert(tokens: int = 65536) -> Iterator[Row]:
    for names in CONVERTED:
        kinds = [get_kv_format(name) for name in names]
        head_dim = next((kind.head_dim for kind in kinds if not kind.dense), kinds[0].head_dim)
        size = tokens * (sum(bytes_of(name, head_dim) for name in names) + 16)
        turns = []
        for _ in range(turns_for(size)):
            sides = [
                (pool(name, 64, tokens // 64, head_dim), slots_of_pages(tokens // 64), descale_of(name))
                for name in names
            ]
            turns.append([part for parts in zip(*sides, strict=True) for part in parts])

        def call(turn: Any, names: tuple[str, str] = names) -> None:
            mla_suite.convert_kv(*turn, source_format=names[0], destination_format=names[1])

        yield beside_copy(f"{names[0]} to {names[1]}", call, turns, size)


def slots_of_pages(pages: int) -> torch.Tensor:
    """All slots of pages of 64, the pages in random order."""
    order = torch.randperm(pages, device=DEVICE)[:, None] * 64
    return (order + torch.arange(64, device=DEVICE)).flatten()


def append() -> Iterator[Row]:
    for kv_format in ("v41", "v41_fp4", "v32_nope"):
        kind = get_kv_format(kv_format)
        for tokens in (32768, 1024):
            for rotated in (False, True) if kv_format != "v32_nope" else (False,):
                size = tokens * (kind.head_dim * 2 + bytes_of(kv_format, kind.head_dim) + 8)
                table = torch.rand(8192, 64, device=DEVICE)
                if rotated:  # positions, and the angles that they name
                    size += tokens * 8 + min(tokens, len(table)) * 256
                turns = []
                for _ in range(turns_for(size)):
                    kv_c, k_pe = (torch.randn(tokens, n, device=DEVICE).bfloat16() for n in (kind.latent, kind.rope))
                    slots = torch.randperm(tokens, device=DEVICE)
                    positions = torch.arange(tokens, device=DEVICE) % 8192 if rotated else None
                    turns.append((kv_c, k_pe, caches.empty(kind, tokens // 64, 64, device=DEVICE), slots, positions))

                def call(turn: Any, name: str = kv_format, table: Any = table if rotated else None) -> None:
                    mla_suite.append_kv(*turn[:4], None, table, turn[4], kv_format=name)

                yield beside_copy(f"append of {tokens} {kv_format}{' rotated' * rotated}", call, turns, size)


_ALL = (trees, windows, widths, mixed, prompts, records, hca, fp8, bf16, widened, convert, append)
PARTS = {part.__name__: part for part in _ALL}


def measure(row: Row, pairs: int) -> tuple[float, float, float]:
    """Median times of both, and the median ratio of pairs of replays."""
    both = Replay(row.call, row.turns), Replay(row.other, row.other_turns)
    found = [[replay.round(0.0, iters=1) for replay in both] for _ in range(pairs)]
    first, second = (median(times) for times in zip(*found, strict=True))
    return first, second, median(own / other for own, other in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="repeatable (default: all)")
    parser.add_argument("--pairs", type=int, default=30, help="of graph replays for a line (default 30)")
    parser.add_argument("--csv", type=writable, help="write the rows to this file as they come")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_served: needs a GPU; `python -m mla_suite emulate --help` counts on AMD without one")
    about = environment.describe(torch.device(DEVICE))
    about["command"] = f"python benchmarks/bench_served.py --pairs {arguments.pairs}"
    table = Table(arguments.csv, about, shown=("us", "other us", "ratio", "row"))
    for part in arguments.part or PARTS:
        for row in PARTS[part]():
            own, other, ratio = measure(row, arguments.pairs)
            table.add({"row": row.name, "us": own, "other us": other, "ratio": ratio})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
