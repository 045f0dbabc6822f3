"""The tables of docs/scale.md: attention on 1 to 1,024 GPUs by scale_model.py, and beside it what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from statistics import mean

import scale_model as model
from scale_model import H100, H200, KINDS, OVER_NCCL, RUNS, Machine, Row

MEMORY = 1e11  # bytes of a GPU for the cache of all layers; where it does not fit, no time is given
CASES = ((128, 4096), (8192, 4096), (1024, 131_072), (1, 1_048_576))
RANKS = (1, 2, 4, 8, 64, 1024)
COLLECTIVES = {"sum": "sum of hidden states", "gather": "gather of queries", "merge": "merge of partial results"}
COUNTED = {2: "two", 4: "four"}


def way_of(row: Row) -> str:
    return " x ".join(f"{way.upper()}{ranks}" for way, ranks in row.split.items())


def by_way(rows: Iterable[Row]) -> dict[tuple[int, ...], dict[str, Row]]:
    """The layers' rows by batch and keys, and by way."""
    found: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows:
        if row.kind == "layer":
            found.setdefault(row.sizes, {})[way_of(row)] = row
    return found


H100S = model.rows("h100x2.csv", 2)
BEFORE = {(row.what, way_of(row)): row for row in model.rows("h200x4_predicted.csv", 4)}


def lined(columns: str, cells: Iterable[list[str]], *, texts: int = 1) -> str:
    """A table whose first columns are text and whose others are numbers."""
    numbers = columns.count("|") - 1 - texts
    return "\n".join(
        [columns, "|" + "---|" * texts + "---:|" * numbers, *(f"| {' | '.join(each)} |" for each in cells)]
    )


def name_of(row: Row) -> str:
    """A row in words: a layer's sizes, a context's, or a collective's tokens."""
    if row.kind in KINDS:
        return f"{COLLECTIVES[row.kind]}, {row.sizes[0]}"
    if row.kind == "layer":
        return f"batch {row.sizes[0]}, {row.sizes[1]:,} keys"
    return f"one sequence, {row.sizes[1]:,} keys" + (f", {row.sizes[0]} query tokens" if row.sizes[0] > 1 else "")


def error(us: float, modelled_us: float) -> str:
    return f"{(modelled_us / us - 1) * 100:+.0f} %"


def compared(us: float, modelled_us: float) -> list[str]:
    """Cells: a measured time, the model's and the model's error."""
    return [f"{us:.1f}", f"{modelled_us:.1f}", error(us, modelled_us)]


def machine_table(machine: Machine) -> str:
    """Microseconds per layer and step, by the model."""
    cells = []
    for batch, kv_len in CASES:
        for name, way in model.WAYS.items():
            us = []
            for ranks in RANKS:
                # Heads split no further than they are many, sequences likewise.
                most = {"DP": batch, "CP in a node x DP": batch * model.NODE}.get(name, model.HEADS)
                held = batch * kv_len * model.TOKEN_BYTES * model.LAYERS / (1 if name == "TP" else ranks)
                possible = ranks <= most and held <= MEMORY
                us.append(f"{model.layer(machine, batch, kv_len, **way(ranks)) * 1e6:,.0f}" if possible else "-")
            if set(us) != {"-"}:
                cells.append([f"{batch} x {kv_len:,}", name, *us])
    columns = f"| {machine.name}: batch x kv | way | " + " | ".join(f"{ranks} GPUs" for ranks in RANKS) + " |"
    return lined(columns, cells, texts=2)


def shares() -> str:
    """What four H200s took of one's time in every way, the least in bold."""
    cells, ways = [], ("TP4", "TP2 x CP2", "CP4", "DP4")
    for (batch, kv_len), rows in by_way(RUNS[4]).items():
        took = {way: row.us["many_us"] / row.us["one_us"] for way, row in rows.items()}
        least = min(took.values())
        shown = [f"**{took[way]:.2f}**" if took[way] == least else f"{took[way]:.2f}" for way in ways]
        cells.append([f"{batch} x {kv_len:,}", *shown])
    return lined(f"| four H200s: batch x keys | {' | '.join(ways)} |", cells)


def every_way() -> str:
    """A layer over four H200s in every way: measured, by the model, and as it was predicted before the run."""
    cells, shown = [], ""
    for row in (row for row in RUNS[4] if row.kind == "layer"):
        before, one = BEFORE[row.what, way_of(row)], row.us["one_us"]
        for way, ranks, column in (("one GPU", 1, "one_us"), (way_of(row), 4, "many_us")):
            if ranks == 1 and row.what == shown:
                continue
            us, shown = row.us[column], row.what
            predicted = before.us[column]
            cells.append([
                name_of(row), way, *compared(us, us_of(row, H200, ranks)), f"{us / one:.2f}",
                f"{us_of(row, H200, ranks) / us_of(row, H200, 1):.2f}", f"{predicted:.1f}", error(us, predicted),
            ])  # fmt: skip
    columns = "| layer | way | us | model | error | of one GPU | model | predicted before, us | error |"
    return lined(columns, cells, texts=2)


def us_of(row: Row, machine: Machine, ranks: int) -> float:
    return model.modelled(row, machine, ranks) * 1e6


def beside_nccl(ranks: int, *kinds: str) -> str:
    """Layers or contexts of one and several H200s, through peer memory and NCCL: measured, and by the model."""
    ways, cells = (("one_us", H200, 1), ("many_us", H200, ranks), ("nccl_us", OVER_NCCL, ranks)), []
    for row in RUNS[ranks]:
        if row.kind in kinds and "nccl_us" in row.us:
            times = [cell for name, machine, n in ways for cell in compared(row.us[name], us_of(row, machine, n))]
            share = f"{row.us['many_us'] / row.us['one_us']:.2f}"
            cells.append([f"{'TP' if row.kind == 'layer' else 'CP'} {name_of(row)}", *times, share])
    many = COUNTED[ranks]
    columns = (
        f"| what | one GPU, us | model | error | {many} GPUs, us | model | error | NCCL, us | model | error | "
        f"{many} / one |"
    )
    return lined(columns, cells)


def collectives(ranks: int) -> str:
    """The collectives of H200s: measured, and on their lines."""
    cells = []
    for kind in COLLECTIVES:
        for row in (row for row in RUNS[ranks] if row.kind == kind):
            times = [
                cell
                for name, machine in (("many_us", H200), ("nccl_us", OVER_NCCL))
                for cell in compared(row.us[name], us_of(row, machine, ranks))
            ]
            cells.append([name_of(row), *times, f"{row.us['many_us'] / row.us['nccl_us']:.2f}"])
    columns = "| collective, tokens | peer memory, us | model | error | NCCL, us | model | error | peer memory / NCCL |"
    return lined(columns, cells)


def sums() -> str:
    """Sums of four H200s in one exchange and in two."""
    cells = []
    for row in (row for row in RUNS[4] if row.kind == "sum"):
        times = []
        for way in ("one", "two"):
            us = H200.collective("sum", row.sizes[0], 4, way) * 1e6
            times += compared(row.us[f"in_{way}_us"], us)
        cells.append([str(row.sizes[0]), *times])
    return lined("| tokens | one exchange, us | model | error | two, us | model | error |", cells)


def lines() -> str:
    cells = []
    for kind in COLLECTIVES:
        lines = model.PEER_MEMORY[kind], model.NCCL[kind]
        cells.append([kind, *(
            f"{line.two_ranks * 1e6:.1f} us + {line.further_rank * 1e6:.1f} us per rank above two, "
            f"{1e-9 / line.per_byte:.0f} GB/s" for line in lines
        )])  # fmt: skip
    return lined("| line | through peer memory | through NCCL |", cells, texts=3)


def predicted() -> str:
    """Collectives and contexts of four H200s as they were predicted from two."""
    cells = []
    for row in (row for row in RUNS[4] if row.kind != "layer"):
        before = BEFORE[row.what, way_of(row)]
        times = [cell for name in ("many_us", "nccl_us") for cell in compared(row.us[name], before.us[name])]
        cells.append([name_of(row), *times])
    return lined("| what | peer memory, us | predicted | error | NCCL, us | predicted | error |", cells)


def flags() -> str:
    """Collectives of four H200s in three runs: flags of one peer after another, of all at once, and the first again."""
    runs: dict[str, list[str]] = {}
    for each in model.saved("h200x4_flags.csv"):
        runs.setdefault(name_of(Row.read(each, 4)), []).append(f"{float(each['many_us']):.1f}")
    cells = [[name, *us] for name, us in sorted(runs.items(), key=lambda item: item[0].split(",")[0])]
    return lined("| collective, tokens | flags in turn, us | at once | in turn |", cells)


def end_of_tp(ranks: int) -> list[float]:
    """Cached tokens (sequences x keys) from which TP is behind DP or CP by the model, for batches of 8 to 128."""
    found = []
    for batch in (8, 16, 32, 64, 128):
        longer = (kv_len for kv_len in range(128, 2**20, 128) if behind(batch, kv_len, ranks))
        found.append(batch * next(longer))
    return found


def behind(batch: int, kv_len: int, ranks: int) -> bool:
    tp, *others = (model.layer(H200, batch, kv_len, **{way: ranks}) for way in ("tp", "cp", "dp"))
    return tp > min(others)


def two_h100s() -> str:
    """A layer over two H100s in every way, as a share of one H100's time: measured, and by the model."""
    cells = []
    for _, rows in sorted(by_way(H100S).items()):
        ways = [rows[f"{way}2"] for way in ("TP", "CP", "DP")]
        shown = [
            cell
            for row in ways
            for cell in (
                f"{row.us['many_us'] / row.us['one_us']:.2f}",
                f"{us_of(row, H100, 2) / us_of(row, H100, 1):.2f}",
            )
        ]
        cells.append([name_of(ways[0]), f"{ways[0].us['one_us']:.0f}", *shown])
    return lined("| layer | one GPU, us | TP | model | CP | model | DP | model |", cells)


def errors() -> Iterator[tuple[str, str, list[float]]]:
    """Rows of a kind in words, what of them the model is fitted to, and the model's relative errors there."""

    def of(runs: dict[int, list[Row]], machine: Machine, column: str, *kinds: str) -> list[float]:
        found = {
            (ranks, row.what, column != "one_us" and way_of(row)):
                us_of(row, machine, 1 if column == "one_us" else ranks) / row.us[column] - 1
            for ranks, run in runs.items() for row in run if row.kind in kinds and column in row.us
        }  # fmt: skip
        return list(found.values())

    def on_one(kind: str) -> list[float]:
        return [us_of(row, H200, 1) / us - 1 for row, _, us in model.one_gpu() if row.kind == kind]

    yield "collectives of two and four H200s, peer memory", "all", [
        machine_us / us - 1
        for kind in KINDS
        for ranks, row, way, us in model.measured_collectives(kind, nccl=False)
        for machine_us in [H200.collective(kind, row.sizes[0], ranks, way) * 1e6]
    ]  # fmt: skip
    yield "collectives of two and four H200s, NCCL", "all", of(RUNS, OVER_NCCL, "nccl_us", *KINDS)
    yield "layers on one H200", "all", on_one("layer")
    yield "layers over two and four H200s", "none", of(RUNS, H200, "many_us", "layer")
    yield "layers over two and four H200s, NCCL", "none", of(RUNS, OVER_NCCL, "nccl_us", "layer")
    yield "one sequence on one H200", "all", on_one("decode")
    yield "one sequence over two and four H200s", "none", of(RUNS, H200, "many_us", "decode")
    yield "one sequence over two and four H200s, NCCL", "none", of(RUNS, OVER_NCCL, "nccl_us", "decode")
    yield "collectives of two H100s, peer memory", "none", of({2: H100S}, H100, "many_us", *KINDS)
    yield "layers on one H100", "none", of({2: H100S}, H100, "one_us", "layer")
    yield "layers over two H100s", "none", of({2: H100S}, H100, "many_us", "layer")
    yield "one sequence over two H100s", "none", of({2: H100S}, H100, "many_us", "decode")


def error_table() -> str:
    cells = []
    for name, fit, found in errors():
        worst = max(found, key=abs)
        cells.append([name, fit, str(len(found)), f"{100 * mean(map(abs, found)):.0f} %", f"{100 * worst:+.0f} %"])
    return lined("| rows | fitted to | number | mean error | worst |", cells, texts=2)


def tables() -> dict[str, list[str]]:
    """The tables by what they are made from: a run of results/distributed, or the model."""
    return {
        "benchmarks/scale_tables.py": [*map(machine_table, model.MACHINES), lines(), error_table()],
        "h200x4.csv": [shares(), every_way(), beside_nccl(4, "decode"), collectives(4), sums()],
        "h200x4_predicted.csv": [predicted()],
        "h200x4_flags.csv": [flags()],
        "h200x2.csv": [beside_nccl(2, "layer", "decode"), collectives(2)],
        "h100x2.csv": [two_h100s()],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("\n\n".join(table for made in tables().values() for table in made))
