"""Phrases of docs/scale.md, and of README on several GPUs, as the saved runs and the model of the program give them.

Like `saved_figures`, whose records these are: each function yields what one or two sources give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import scale_model as model
import scale_tables
from saved_figures import DECODE, README, Sourced, saved, span
from scale_model import H200, Row
from scale_tables import BEFORE, by_way, us_of

from mla_suite.distributed import peer_memory

SCALE, TABLES = "docs/scale.md", "benchmarks/scale_tables.py"
FOLDER = "benchmarks/results/distributed/"
TWO, FOUR, PREDICTED, FLAGS, H100S = (
    f"{FOLDER}{run}.csv" for run in ("h200x2", "h200x4", "h200x4_predicted", "h200x4_flags", "h100x2")
)


def by_what(rows: list[Row]) -> dict[str, dict[str, float]]:
    """The times of rows that have one way each."""
    return {row.what: row.us for row in rows}


def fastest(rows: dict[str, Row], us: Callable[[Row], float]) -> str:
    return min(rows, key=lambda way: us(rows[way]))


def tables() -> Iterator[Sourced]:
    for source, made in scale_tables.tables().items():
        path = source if source == TABLES else f"{FOLDER}{source}"
        yield Sourced(SCALE, path, [" ".join(table.split()) for table in made])


def the_model() -> Iterator[Sourced]:
    """What the page says of the program, its fit, its assumptions and its errors."""
    gather, amd = model.KINDS["gather"] * 128, model.MACHINES[1:]
    links = [f"{each.link_to_peer / 1e9:g} GB/s to each of 7 GPUs" for each in amd]
    ends = {ranks: [tokens / 1e6 for tokens in scale_tables.end_of_tp(ranks)] for ranks in (2, 4)}
    errors = {name: found for name, _, found in scale_tables.errors()}
    worst = {name: f"{100 * max(map(abs, found)):.0f} %" for name, found in errors.items()}
    h200 = {name: found for name, found in errors.items() if "H100" not in name}
    assert max(abs(each) for name in h200 if name.startswith("layers") for each in h200[name]) < 0.15
    nccl = {
        kind: [
            H200.collective(kind, row.sizes[0], ranks, way) * 1e6 / us - 1
            for ranks, row, way, us in model.measured_collectives(kind, nccl=True)
        ]
        for kind in model.KINDS
    }
    assert max(abs(each) for kind in ("sum", "merge") for each in nccl[kind]) < 0.17
    several = [
        us_of(row, H200, ranks) - row.us["many_us"]
        for ranks, run in model.RUNS.items()
        for row in run
        if row.kind == "decode" and row.sizes[0] == 1
    ]
    assert max(several) < 0
    assert max(errors["collectives of two H100s, peer memory"]) < 0
    rates = [1e-9 / line.per_byte for line in model.PEER_MEMORY.values()]
    merges, sums = ([by_what(model.RUNS[ranks])[what]["nccl_us"] for ranks in (2, 4)]
                    for what in ("merge 128 x 128 x 512 bf16", "sum 128 x 7168 bf16"))  # fmt: skip
    assert sums[1] < sums[0]
    largest = max(int(row["sent_bytes"]) for row in model.saved("h200x4.csv") if row["sent_bytes"])
    yield Sourced(
        SCALE,
        TABLES,
        [
            f"falls behind DP or CP at {span(ends[2], 1)} million tokens on two H200s "
            f"and at {span(ends[4])} million on four",
            f"operations over {H200.reached:.2f} of the matrix rate",
            f"A layer takes {H200.layer * 1e6:.0f} us beside them, and attention by itself {H200.decode * 1e6:.0f}",
            *(
                f"| {each.name} | {each.memory / 1e12:.1f} TB/s | {each.matrix / 1e12:.0f} TFLOP/s | {link} | "
                f"{each.network / 1e9:.0f} GB/s |"
                for each, link in zip(model.MACHINES, (f"{H200.link / 1e9:.0f} GB/s to any GPU", *links), strict=True)
            ),
            f"taken to cost {H200.network_latency * 1e6:.0f} us",
            f"NVLink: {2 * H200.link / 1e9:.0f} GB/s both ways",
            " and ".join(f"{2 * each.link_to_peer / 1e9:g}" for each in amd) + " GB/s both ways",
            f"{gather / 1e6:.0f} MB per rank, {gather / H200.network * 1e3:.1f} ms on {H200.network / 1e9:.0f} GB/s",
            f"H200s' layers are within {worst['layers over two and four H200s']}, and their collectives within "
            f"{worst['collectives of two and four H200s, peer memory']} but for NCCL's gathers, which are missed by up "
            f"to {100 * max(map(abs, nccl['gather'])):.0f} %",
            f"missed by up to {worst['one sequence over two and four H200s']}, with one query token always too short",
            f"missed by up to {worst['collectives of two H100s, peer memory']}, always too short",
            f"A second exchange of a sum adds {model.PEER_MEMORY['sum'].second_exchange * 1e6:.1f} us. A GPU sends at "
            f"{span(rates, 0)} GB/s of the link's {H200.link / 1e9:.0f} GB/s",
            f"or {100 * (merges[1] / merges[0] - 1):.0f} % longer",
            f"Larger tensors than {largest / 1e6:.1f} MB",
        ],
    )
    floors = saved(DECODE)["floors"]
    size, us = floors["read"][-1]
    yield Sourced(SCALE, DECODE, [f"| H200 | {size / us / 1e6:.1f} TB/s | {round(floors['tflops'], -1):.0f} TFLOP/s |"])


def four_gpus() -> Iterator[Sourced]:
    """What the page says of the run on four H200s, beside what was predicted and what two took."""
    took, layers = by_what([row for row in model.RUNS[4] if row.kind != "layer"]), by_way(model.RUNS[4])
    share = {sizes: {way: row.us["many_us"] / row.us["one_us"] for way, row in ways.items()}
             for sizes, ways in layers.items()}  # fmt: skip
    before = {sizes: {way: BEFORE[row.what, way].us for way, row in ways.items()} for sizes, ways in layers.items()}
    short = [1 - before[sizes][way]["many_us"] / row.us["many_us"]
             for sizes, ways in layers.items() for way, row in ways.items()]  # fmt: skip
    missed = {(sizes, way): abs(us["many_us"] / us["one_us"] - share[sizes][way])
              for sizes, ways in before.items() for way, us in ways.items()}  # fmt: skip
    worst = max(missed, key=missed.__getitem__)
    assert min(short) > 0
    assert worst == ((128, 512), "CP4")
    first = {sizes: fastest(ways, lambda row: row.us["many_us"]) for sizes, ways in layers.items()}
    assert first == {sizes: min(ways, key=lambda way: ways[way]["many_us"]) for sizes, ways in before.items()}
    modelled = {sizes: fastest(ways, lambda row: us_of(row, H200, 4)) for sizes, ways in layers.items()}
    (apart,) = [sizes for sizes in first if modelled[sizes] != first[sizes]]
    assert (apart, modelled[apart], first[apart]) == ((32, 32_768), "TP2 x CP2", "CP4")
    behind = layers[apart]["TP2 x CP2"].us["many_us"] / layers[apart]["CP4"].us["many_us"] - 1
    assert [sizes for sizes, way in first.items() if way == "TP4"] == [(32, 512), (32, 4096), (128, 512)]
    for sizes in ((32, 512), (32, 4096), (32, 32_768)):
        assert sorted(share[sizes], key=share[sizes].__getitem__)[1] == "TP2 x CP2"
    two = {row.sizes: row.us["many_us"] for row in model.RUNS[2] if row.kind == "layer"}
    gained = {sizes: 1 - layers[sizes]["TP4"].us["many_us"] / us for sizes, us in two.items()}
    latents = 128 * 32_768 * model.TOKEN_BYTES / H200.memory * 1e6
    tp_long = [share[batch, 32_768]["TP4"] for batch in (128, 32)]
    in_cp = [took[what]["many_us"] for what in
             ("sum 128 x 7168 bf16", "gather 128 x 128 x 576 bf16", "merge 128 x 128 x 512 bf16")]  # fmt: skip
    assert sum(in_cp) > 0.75 * model.HEAD_BYTES / H200.memory * 1e6
    middle = share[128, 4096]
    assert middle["TP2 x CP2"] < middle["TP4"] < middle["CP4"]
    merge = took["merge 1 x 128 x 512 bf16"]
    keys = [took[f"decode B1 H128 q_len 1 kv {each}"] for each in (262_144, 1_048_576, 4_194_304)]
    apart_us = [f"{each['own_keys_us'] + merge['many_us']:.1f}" for each in keys]
    whole_us = [f"{each['many_us']:.1f}" for each in keys]
    assert all(0.98 < each["nccl_us"] / each["many_us"] < 1 for each in keys[1:])
    over_nccl = [ways["TP4"].us["nccl_us"] - ways["TP4"].us["many_us"] for ways in layers.values()]
    second = {tokens: took[f"sum {tokens} x 7168 bf16"]["in_two_us"] - took[f"sum {tokens} x 7168 bf16"]["in_one_us"]
              for tokens in (1, 32, 128)}  # fmt: skip
    assert abs(second[32]) < 0.3
    for ranks, tokens in ((4, 28), (8, 8)):
        sums = [
            peer_memory.sums_in_two(each * 14336, ranks, peer_memory.TOTAL_SLICE_BYTES) for each in range(tokens + 1)
        ]
        assert sums == [False] * tokens + [True]
    ahead, later = 32 * 4096, 128 * 4096
    million = keys[1]["many_us"] / keys[1]["one_us"]
    yield Sourced(
        README,
        FOUR,
        [f"takes {share[128, 512]['TP4']:.2f} (512 keys) and {middle['TP4']:.2f} (4,096) tensor-parallel, one sequence "
         f"of a million keys {million:.2f}"],
    )  # fmt: skip
    yield Sourced(
        SCALE,
        FOUR,
        [
            f"ahead at {ahead:,} and behind at {later:,}",
            f"layer was predicted too short, over four GPUs by {100 * min(short):.0f} to {100 * max(short):.0f} %",
            f"missed by up to {missed[worst]:.2f} (CP4 at 128 sequences of 512 keys)",
            f"where CP4 is, by {100 * behind:.0f} %",
            f"take {100 * gained[128, 512]:.0f} % (512 keys) and {100 * gained[128, 4096]:.0f} % (4,096) less than two",
            f"TP4 stays at {tp_long[0]:.2f} to {tp_long[1]:.2f}, as each rank reads all latents: {latents:.0f} of "
            f"{layers[128, 32_768]['TP4'].us['many_us']:.0f} us",
            f"{share[128, 32_768]['DP4']:.2f} beside {share[128, 32_768]['CP4']:.2f}",
            f"take {in_cp[0]:.1f}, {in_cp[1]:.1f} and {in_cp[2]:.1f} us by themselves at 128 tokens",
            f"({middle['TP2 x CP2']:.2f}; {middle['TP4']:.2f} and {middle['CP4']:.2f})",
            f"{merge['nccl_us'] - merge['many_us']:.1f} us longer",
            f"take {apart_us[0]}, {apart_us[1]} and {apart_us[2]} us at 262,144, 1,048,576 and 4,194,304 keys with one "
            f"query token; together they take {whole_us[0]}, {whole_us[1]} and {whole_us[2]}",
            f"NCCL costs {span(over_nccl, 1)} us more",
            f"{-second[128]:.1f} us less at 128 and {second[1]:.1f} more at one",
        ],
    )


def predicted() -> Iterator[Sourced]:
    """What two H200s said of the collectives of four."""
    found = {
        row.what: (row.us["many_us"], BEFORE[row.what, ""].us["many_us"]) for row in model.RUNS[4] if not row.split
    }
    ones = [1 - predicted / us for what, (us, predicted) in found.items() if " 1 x " in what]
    larger = [abs(predicted / us - 1) for what, (us, predicted) in found.items() if " 1 x " not in what]
    nccl = [BEFORE[row.what, ""].us["nccl_us"] / row.us["nccl_us"] - 1 for row in model.RUNS[4] if not row.split]
    yield Sourced(
        SCALE,
        FOUR,
        [
            f"predicted {100 * min(ones):.0f} to {100 * max(ones):.0f} % too short through peer memory",
            f"those of 32 and 128 tokens within {100 * max(larger):.0f} %",
            f"predicted up to {100 * max(nccl):.0f} % too long",
        ],
    )


def flags() -> Iterator[Sourced]:
    """Flags of one peer after another, and of all at once."""
    took = by_what([row for row in model.RUNS[4] if row.kind != "layer"])
    runs: dict[str, list[float]] = {}
    for row in model.saved("h200x4_flags.csv"):
        runs.setdefault(row["what"], []).append(float(row["many_us"]))
    longer = [(first_us + last_us) / 2 - at_once for first_us, at_once, last_us in runs.values()]
    again = {what: abs(took[what]["many_us"] / us[1] - 1) for what, us in runs.items()}
    assert max(again, key=again.__getitem__) == "sum 1 x 7168 bf16"
    yield Sourced(
        SCALE,
        FLAGS,
        [
            f"took {span(longer, 1)} us longer",
            f"differ by up to {100 * max(again.values()):.0f} % (a sum of one token)",
        ],
    )


def two_gpus() -> Iterator[Sourced]:
    took = by_what(model.RUNS[2])
    layers = took["layer B128 kv 512"], took["layer B128 kv 4096"]
    short, far = (took[f"decode B1 H128 q_len 1 kv {keys}"] for keys in (262_144, 1_048_576))
    shares = [row["many_us"] / row["one_us"] for row in (*layers, short, far)]
    yield Sourced(
        README,
        TWO,
        [f"takes {shares[0]:.2f} (512 keys) and {shares[1]:.2f} (4,096) of the time, one sequence of a million keys "
         f"{shares[3]:.2f}"],
    )  # fmt: skip
    sums = [row["nccl_us"] - row["many_us"] for row in (*layers, took["sum 128 x 7168 bf16"])]
    merge = took["merge 1 x 128 x 512 bf16"]
    read = model.DOWN_BYTES + 128 * 512 * model.TOKEN_BYTES
    whole = read + model.HEAD_BYTES / 2
    yield Sourced(
        SCALE,
        TWO,
        [
            f"{read / 1e6:.0f} MB of the {whole / 1e6:.0f} MB that it reads at all, {read / H200.memory * 1e6:.0f} of "
            f"{whole / H200.memory * 1e6:.0f} us at {H200.memory / 1e12:.1f} TB/s",
            f"costs {sums[0]:.1f} and {sums[1]:.1f} us more than through peer memory, where the same two sums alone "
            f"are {sums[2]:.1f} us apart",
            f"took {short['own_keys_us']:.1f} and {far['own_keys_us']:.1f} us at 262,144 and 1,048,576 keys",
            f"| sum of 128 tokens, us | 10 | {took['sum 128 x 7168 bf16']['many_us']:.1f} |",
            f"| merge of one token, us | 7 | {merge['many_us']:.1f} |",
            f"| TP layers, us | 123, 244 | {layers[0]['many_us']:.1f}, {layers[1]['many_us']:.1f} |",
            f"share of one GPU's time | 0.60, 0.54 | {shares[2]:.2f}, {shares[3]:.2f} |",
            f"takes {short['own_keys_us']:.1f} us in a graph of such calls and the merge {merge['many_us']:.1f}, but "
            f"together they take {short['many_us']:.1f}. The other "
            f"{short['many_us'] - short['own_keys_us'] - merge['many_us']:.0f} us are there through NCCL too "
            f"({short['nccl_us']:.1f}, although its merge is {merge['nccl_us'] - merge['many_us']:.0f} us longer)",
        ],
    )
    rows = by_what([row for row in scale_tables.H100S if row.kind != "layer"])
    second = [us["in_two_us"] - us["in_one_us"] for us in rows.values() if "in_two_us" in us]
    longest = rows["decode B1 H128 q_len 1 kv 4194304"]
    first = {sizes: fastest(ways, lambda row: row.us["many_us"]) for sizes, ways in by_way(scale_tables.H100S).items()}
    on_four = {sizes: fastest(ways, lambda row: row.us["many_us"]) for sizes, ways in by_way(model.RUNS[4]).items()}
    assert {sizes: way[:2] for sizes, way in first.items()} == {sizes: way[:2] for sizes, way in on_four.items()}
    yield Sourced(
        SCALE,
        H100S,
        [
            f"cost {span(second, 1)} us in sums",
            f"took {longest['many_us'] / longest['one_us']:.2f} of one GPU's time with CP",
        ],
    )


SOURCES: tuple[Callable[[], Iterator[Sourced]], ...] = (tables, the_model, four_gpus, predicted, flags, two_gpus)
