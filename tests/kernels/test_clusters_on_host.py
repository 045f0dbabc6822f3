"""Clusters of sparse and of dense decode on sm_90, run on a CPU against fp64 (kernels_on_host.py).

The blocks of a cluster are threads of one scheduler. What they copy to each other is read when it arrives, now and then
far later than the rest. Boxes for two blocks reach them at different times, and a block that has ended can neither be
copied to nor from. Now and then a block stops behind an arrival at its peer until the others wait for it: so does one
of a process that another interrupts.
"""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel, without

SPARSE, DENSE = (HostKernel(source, "sm_90/decode") for source in ("sparse_records.cpp", "dense.cpp"))
CLUSTERS = {"share_kv": (2, 1), "share_and_reduce": (2, 2), "reduce_four": (1, 4)} | dict.fromkeys(
    ("reduce_o", "reduce_last", "exchange_p"), (1, 2)
)
"""Mode -> blocks of a cluster along both dimensions of the grid."""


STOPS = {"HOST_STOPS": 16}


def clusters(mode):
    x, y = CLUSTERS[mode]
    size = {"CLUSTER_MODE": mode, "HOST_BLOCK_THREADS": 512, "HOST_CLUSTER_X": x, "HOST_CLUSTER_Y": y}
    return size | STOPS if mode.startswith("share") else size  # faults of other modes show without


SPARSE_PROBLEMS = {
    "share_kv": [
        "100 14 3 2 lengths 64 3 40",
        "128 5 1 1 lengths 64 3 60 16 9 45",
        "70 8 1 2 sink 7 20 170",
        "100 6 2 2 planned 64 2 128",
        "128 4 2 3 absent 64 0 40",
        "300 3 1 1 ragged 16 9 90",
    ],
    # Each block has one split.
    "reduce_o": [
        "40 3 2 6 plain 64 3 97",
        "33 9 4 36 lengths 16 9 200",
        "20 4 2 8 sink 7 20 70 32 9 45",
        "64 5 2 10 absent 64 0 40",
        "17 3 6 18 sharp 1 40 333",
        "5 9 2 18 one 64 4 1",
    ],
    "reduce_four": [
        "40 3 4 12 plain 64 3 97",
        "33 5 8 40 lengths 16 9 300",
        "20 3 4 12 sink 7 20 70 32 9 45",
        "64 3 4 12 absent 64 0 40",
        "17 2 12 24 sharp 1 40 400",
        "5 6 4 24 one 64 4 1",
    ],
    "share_and_reduce": [
        "100 3 2 6 plain 64 3 97",
        "128 6 4 24 lengths 64 3 200",
        "70 4 2 8 sink 7 20 170",
        "100 4 2 8 absent 64 0 40",
        "300 2 6 12 ragged 16 9 290",
    ],
}
IN_DEFAULT = ("v32, share_kv", "dsv4, share_and_reduce", "dsv4, reduce_four", "bf16x576, reduce_four")


def sparse(record, mode):
    return {"KV_FORMAT": record, "D_V": 512} | clusters(mode)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_DEFAULT else [pytest.mark.full])
        for name in (
            *(f"{record}, {mode}" for record in ("v32", "dsv4", "v32nope", "v41any") for mode in SPARSE_PROBLEMS),
            *(f"{record}, {mode}" for record in ("bf16x576", "bf16x512") for mode in ("reduce_o", "reduce_four")),
        )
    ],
)
def test_results_of_selected_keys_are_those_of_fp64(tmp_path, name):
    record, mode = name.split(", ")
    problems = SPARSE_PROBLEMS[mode]
    if record == "v41any":  # of 528 and of 288 bytes
        splits = 4 if mode == "reduce_four" else 2
        problems = [
            f"100 4 {splits} {4 * splits} lengths 64 3 97 16f 9 140",
            f"128 3 {splits} {3 * splits} sink 7fi 20 70 32i 9 45",
        ]
    if record == "v32":
        problems = [*problems, problems[0].replace(" plain ", " parts ").replace(" lengths ", " parts ")]
    SPARSE.check(tmp_path, sparse(record, mode) | STOPS, problems)


PRODUCER, PV, QK = "producer_tma.hpp", "mainloop_pv.hpp", "mainloop_qk.hpp"
EXCHANGE_P, REDUCE_O, REDUCE_FOUR = (f"cluster/{name}.hpp" for name in ("exchange_p", "reduce_o", "reduce_four"))
SPARSE_FAULTS = {
    "share_kv: results over keys on their way to the peer": (
        *(PV, "(Cluster::sharing_rank() ^ 1)", "Cluster::sharing_rank()"),
    ),
    "share_kv: results over results that another lane still reads": without(
        "epilogue.hpp", "    if constexpr (PIECES == 1) __syncwarp();  // all lanes have read\n"
    ),
    "share_and_reduce: results over keys on their way to the peer": without(
        "cluster/share_and_reduce.hpp", "    pv.wait_for_readers();\n"
    ),
    "reduce_four: the neighbour's sums before they have come": without(
        REDUCE_FOUR, "      mbarrier_wait(sum_full(tile / Base::CHUNK_TILES), 0);\n"
    ),
    "reduce_four: results over what another lane still merges": without(
        REDUCE_FOUR, "      __syncwarp();  // all lanes are done with what the buffers take the place of\n"
    ),
    "reduce_four: statistics before they have come": without(
        REDUCE_FOUR, "    mbarrier_wait(neighbour_stats_full(barriers), 0);\n"
    ),
    "reduce_four: an end before the neighbour has what is sent": without(
        REDUCE_FOUR, "    mbarrier_wait(ClusterReduceFour::neighbour_copy_done(barriers_), 0);\n"
    ),
    "reduce_four: the columns of the neighbour": (REDUCE_FOUR, "% 2 ^ 1; }", "% 2; }"),
    "reduce_o: results over keys that the peer multiplies": without(
        REDUCE_O, "      if (chunk == 0) mbarrier_wait(ClusterReduceO::peer_ring_drained(barriers_), 0);\n"
    ),
    "reduce_o: the peer's results before they have come": without(
        REDUCE_O, "      mbarrier_wait(o_full(tile / CHUNK_TILES), 0);\n"
    ),
    "reduce_o: the scales of the other split": (
        *(REDUCE_O, "load_merge_scales<Traits>(shared_, 1, peer);", "load_merge_scales<Traits>(shared_, 0, peer);"),
    ),
    "reduce_o: queries of which a peer without keys loads none": (
        "producer.hpp",
        "SHARES_Q = Cluster::MERGES_SPLITS && !Traits::SELECTED;",
        "SHARES_Q = Cluster::MERGES_SPLITS;",
    ),
}


@SPARSE.each_of(SPARSE_FAULTS, "share_kv: results over keys on their way to the peer")
def test_a_fault_with_selected_keys_is_found(tmp_path, name):
    mode = name.split(": ")[0]
    more = ["100 20 3 2 lengths 64 3 40", "128 20 1 1 lengths 64 3 60"] if mode == "share_kv" else []
    SPARSE.assert_found(tmp_path, sparse("v32", mode), SPARSE_FAULTS[name], SPARSE_PROBLEMS[mode] + more)


KINDS = {
    "bf16": {"DTYPE": "bf16", "KV_SOURCE": "tma"},
    "fp16 x 512": {"DTYPE": "fp16", "KV_SOURCE": "tma", "D_QK": 512},
    "masked": {"DTYPE": "bf16", "KV_SOURCE": "tma", "MASKED": 1},
    "folded": {"DTYPE": "bf16", "KV_SOURCE": "tma", "FOLD": 1},
    "un-rotated": {"DTYPE": "bf16", "KV_SOURCE": "tma", "UNROTATED": 1},
    "e4m3 keys": {"DTYPE": "bf16", "KV_SOURCE": "fp8"},
    "e4m3 keys, scaled": {"DTYPE": "bf16", "KV_SOURCE": "fp8", "SCALE_Q": 1},
    "e4m3, masked": {"DTYPE": "fp8", "KV_SOURCE": "fp8", "MASKED": 1},
    "e4m3 scores": {"DTYPE": "fp8", "KV_SOURCE": "fp8_scores"},
}
REDUCING = ("un-rotated", "e4m3 keys", "e4m3 keys, scaled", "e4m3 scores")
MODES = {
    "share_kv": ("bf16", "fp16 x 512", "masked", "folded"),
    "exchange_p": ("bf16", "fp16 x 512", "masked"),
    "reduce_o": ("bf16", "fp16 x 512", "masked", "e4m3, masked", *REDUCING),
    "reduce_last": ("bf16", "fp16 x 512", "masked", *REDUCING),
}
"""Mode -> kinds of its instances."""
TWO_SPLITS = [
    *("16 1 64 2 4 plain 128 300", "64 1 64 4 8 sink 70 330", "33 2 32 2 6 ragged 1 0 100", "17 3 64 6 6 sharp 500"),
    *("100 1 96 4 8 all_keys 300 33", "64 1 64 2 8 plain 40 20 70 1", "64 2 64 2 4 parts 70 330"),
]
"""Each block has one split."""
DENSE_PROBLEMS = {
    "share_kv": [
        *("128 1 64 1 1 plain 70 1 0 33", "100 1 64 2 3 sink 128 300 0 40", "40 4 64 1 2 ragged 33 64 200 100 90 80"),
        *("100 1 64 3 2 planned 100 330 20", "70 1 64 1 1 sharp 20 31 1 40 5 70 2 33 9 64 3 12"),
        *("128 2 64 1 1 parts 70 2 33", "4 80 64 1 1 spoiled45 90 130"),
        "128 1 64 1 1 plain " + " ".join(str(20 + length % 12) for length in range(24)),
    ],
    "exchange_p": TWO_SPLITS,
    "reduce_o": TWO_SPLITS,
    # The blocks of a cluster meet within a sequence, or between two, or have two SM parts each.
    "reduce_last": [
        *("16 1 64 3 4 paired+planned 128 300 100", "33 2 32 4 2 ragged+paired+planned 1 64 100"),
        *("100 1 96 3 6 sink+paired+planned 300 33 200", "40 1 64 5 8 paired+planned 300 1 0 200"),
        *("64 1 64 2 4 parts+paired+planned 70 330", "16 1 64 3 2 planned 100 330 200"),
    ],
    "folded": [
        *("100 1 64 2 2 fold32 100 330 200", "128 1 64 5 2 planned+sink+fold64 300 260 130 40"),
        "40 4 32 3 2 ragged+fold64 100 30 200",
    ],
}
LENGTHS = "100 150 200 120 77 99 133 171 300 210 64 180 123 145 167 189"
WINDOWS = {
    "share_kv": [
        "128 1 64 2 3 window40 128 300 1 0",
        "40 4 64 1 2 ragged+window31 33 64 200 100",
        "30 4 64 1 2 tree 300 65",
    ],
    "exchange_p": [
        *("16 1 64 2 4 window40 128 300", "8 2 64 4 8 sink+window100 200 330", "33 2 32 2 6 ragged+window20 1 0 100"),
        *(
            "4 8 64 2 4 tree 300 65",
            *(f"{rows} 64 2 32 {what} {LENGTHS}" for rows, what in [("8 1", "window40"), ("64 2", "window170")]),
        ),
    ],
    "reduce_o": ["16 1 64 2 4 window40 128 300", "8 2 64 4 8 sink+window100 200 330", "4 8 64 2 4 tree 300 65"],
    "reduce_last": ["16 1 64 3 4 paired+planned+window70 128 300 100", "4 8 64 2 4 paired+planned+tree 300 65"],
}


def dense_problems(mode, kind):
    problems = DENSE_PROBLEMS.get(kind) or DENSE_PROBLEMS[mode]
    if "512" in kind:  # rows without a rope part
        problems = [text.replace("parts+", "").replace("parts", "plain") for text in problems]
    return WINDOWS[mode] + problems[:2] if "masked" in kind else problems


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        pytest.param(
            mode, kind, marks=[] if kind == "bf16" and mode in ("share_kv", "exchange_p") else [pytest.mark.full]
        )
        for mode, kinds in MODES.items()
        for kind in kinds
    ],
)
def test_results_are_those_of_fp64(tmp_path, mode, kind):
    DENSE.check(tmp_path, KINDS[kind] | clusters(mode) | STOPS, dense_problems(mode, kind))


DENSE_FAULTS = {
    "share_kv: keys over those that the peer multiplies": without(
        *(PRODUCER, "    this->wait_for_tma_stage(to);\n"),
        behind="    if (warpgroup_thread() % 32 != 0) return;\n    mbarrier_expect_tx(to.full, BYTES);",
    ),
    "share_kv: stages that one block loads alone, ahead of a peer that is stopped": (
        *(PRODUCER, "      else\n        tma_load_multicast(to.at + BOX_BYTES"),
        "      if (stages_ % 2 != cluster_rank())\n        tma_load_multicast(to.at + BOX_BYTES",
    ),
    "share_kv: queries released ahead of a peer that is stopped": (
        *(QK, "      if constexpr (!Cluster::SHARES_KV) release_q_stage(kv_.stage);\n      kv_.next();\n    }\n"),
        "      release_q_stage(kv_.stage);\n      kv_.next();\n    }\n"
        "    if constexpr (Cluster::SHARES_KV) return fence_proxy_async(), named_barrier_sync<128>(QK_BARRIER);\n",
    ),
    "share_kv: an end before the peer's readers have arrived": without(
        PRODUCER, "    if constexpr (Cluster::SHARES_KV) this->wait_for_peer_readers(kv);\n"
    ),
    "share_kv: half of the peer's arrivals": (
        *("cluster/share_kv.hpp", "KV_EMPTY_ARRIVALS = 256 + 8;", "KV_EMPTY_ARRIVALS = 256 + 4;"),
    ),
    "share_kv: the producer's warps a revolution apart": without(
        PRODUCER, "    named_barrier_sync<PRODUCER_BARRIER, 64>();\n"
    ),
    "share_kv: keys loaded before the queries of their tile": without(
        PRODUCER, "    if constexpr (Cluster::SHARES_KV) meet();\n"
    ),
    "share_kv: queries over results": without(
        "producer.hpp", "      wait_for_tma_stage(kv_stage(kv));\n", behind="      if (lane == 0)\n        load_q_half"
    ),
    "share_kv: a list for each row tile": ("tile_scheduler.hpp", "first_row() & -LIST_ROWS<Traits>", "first_row()"),
    "share_kv: keys that only the other row tile sees left out": (
        *("tile_scheduler.hpp", "min(first_row_ + ROWS,", "min(first_row_ + BLOCK_M,"),
    ),
    "share_kv: results over keys of the other warpgroup": without(
        PV, "    if constexpr (Traits::OUT_BYTES == 0) named_barrier_sync<PV_BARRIER, 256>();\n"
    ),
    "exchange_p: an end before the peer has read P": without(
        QK, "    if constexpr (Cluster::EXCHANGES_P) wait_for_p_readers();\n"
    ),
    "exchange_p: O over keys of other warps": without(
        EXCHANGE_P, "    named_barrier_sync<128>(PV_GROUP_BARRIER + group_);  // the other warps read these keys, too\n"
    ),
    "exchange_p: O before it is handed over": without(
        EXCHANGE_P, "      mbarrier_wait(ClusterExchangeP::swap_full(barriers_, group_ ^ 1, chunk), 0);\n"
    ),
    "exchange_p: scales that are not written": without(
        EXCHANGE_P, "    mbarrier_wait(ClusterPair::scales_ready(barriers_), 0);\n"
    ),
    "exchange_p: P sent before it is written": without(
        EXCHANGE_P, "      mbarrier_wait(p_written(barriers, stages.stage), stages.parity);\n"
    ),
    "exchange_p: P over that of which a copy is on its way": (EXCHANGE_P, "128 + 4 + 32;", "128 + 32;"),
    "exchange_p: NaN behind the peer's last key": (
        *(PV, "      if (of_peer() && (command & LAST)) clear_peer_rest();\n", "      ;\n"),
    ),
    "exchange_p: values behind the peer's last key multiplied as they are cleared": without(
        PV, "    named_barrier_sync<128>(PV_GROUP_BARRIER + group_);\n", before="used, BLOCK_N);\n"
    ),
    "exchange_p: peer's keys over those that are multiplied": without(
        *(PRODUCER, "    this->wait_for_tma_stage(to);\n"),
        behind="    if (warpgroup_thread() % 32 != 0) return;\n    mbarrier_expect_tx(to.full, BYTES);",
    ),
    "exchange_p: an end that the peer is not told of": without(
        PV, "        if constexpr (Cluster::EXCHANGES_P) release_p();\n", behind="        return;"
    ),
    "exchange_p, masked: NaN before the peer's window": (
        *(PV, "      if (of_peer() && params_.window_left >= 0) clear_peer_before_window();\n", "      ;\n"),
    ),
    "exchange_p, masked: keys cleared before they arrive": without(
        PV,
        "    mbarrier_wait(kv_full(), kv_.parity);\n",
        behind="    clear_keys<Traits, COLUMNS>(values_at(), 0, skipped);\n",
    ),
    "exchange_p, masked: keys multiplied as they are cleared": without(
        PV, "    named_barrier_sync<128>(PV_GROUP_BARRIER + group_);\n", before="(values_at(), 0, skipped);\n"
    ),
    "reduce_o: O over keys of the other warpgroup": without(REDUCE_O, "    named_barrier_sync<PV_BARRIER, 256>();\n"),
    "reduce_o: an end before what is sent has arrived": without(
        REDUCE_O, "    mbarrier_wait(ClusterReduceO::peer_copy_done(barriers_), 0);\n"
    ),
    "reduce_o: word that all has arrived after the first chunk": (REDUCE_O, "== CHUNKS - 1) report", "== 0) report"),
    "reduce_o: scales that are not written": without(
        REDUCE_O, "    mbarrier_wait(ClusterPair::scales_ready(barriers_), 0);\n"
    ),
    "reduce_o: the peer's sums before they have come": without(
        "cluster/pair_lse_merge.hpp", "  mbarrier_wait(ClusterPair::peer_stats_full(barriers), 0);\n"
    ),
    "reduce_last: results over keys that the peer multiplies": without(
        REDUCE_O, "      if (chunk == 0) mbarrier_wait(ClusterReduceO::peer_ring_drained(barriers_), 0);\n"
    ),
    "reduce_last: O before it is computed": without("cluster/reduce_last.hpp", "    pv.wait_for_product();\n"),
    "reduce_last: parts that do not meet": (
        *("tile_scheduler.hpp", "walks_backwards(params_, part_, plan_parts_) ? --limit_", "false ? --limit_"),
    ),
    "reduce_last: combine not told": without(PRODUCER, "    pair.tell_combine(params_, blockIdx.y);\n"),
    "reduce_last: two sequences added": without("plan_pair.hpp", "    if (first.x != second.x) return;\n"),
    "reduce_last: two of three splits taken for all": (
        *("plan_pair.hpp", "first.y == 0 && second.z == PlanHeader::open_end;", "first.y == 0;"),
    ),
    "reduce_last: a tile without keys not merged": (
        *(PV, "          if (command & MERGE) return Cluster::finish_last(*this);\n", "          ;\n"),
    ),
}


@DENSE.each_of(DENSE_FAULTS, "exchange_p: P over that of which a copy is on its way")
def test_a_fault_is_found(tmp_path, name):
    instance = name.split(": ")[0]
    mode, kind = instance.split(", ") if ", " in instance else (instance, "bf16")
    problems = dense_problems(mode, kind) + (["128 1 64 2 3 sink 33 386 331"] if mode == "share_kv" else [])
    DENSE.assert_found(tmp_path, KINDS[kind] | clusters(mode), DENSE_FAULTS[name], problems)
