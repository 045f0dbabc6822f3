"""Sparse decode's clusters on sm_90, run on a CPU against fp64 (kernels_on_host.py).

The blocks of a cluster are threads of one scheduler. What they copy to each other is read when it arrives, now and then
far later than the rest.
"""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel

KERNEL = HostKernel("sparse_records.cpp", "sm_90/decode")
CLUSTERS = {"share_kv": (2, 1), "reduce_o": (1, 2), "share_and_reduce": (2, 2)}
"""Mode -> blocks of a cluster along both dimensions of the grid."""
PROBLEMS = {
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
    "share_and_reduce": [
        "100 3 2 6 plain 64 3 97",
        "128 6 4 24 lengths 64 3 200",
        "70 4 2 8 sink 7 20 170",
        "100 4 2 8 absent 64 0 40",
        "300 2 6 12 ragged 16 9 290",
    ],
}
IN_DEFAULT = ("v32, share_kv", "dsv4, share_and_reduce")


def instance(record, mode):
    x, y = CLUSTERS[mode]
    return {"KV_FORMAT": record, "D_V": 512, "CLUSTER_MODE": mode} | {
        "HOST_BLOCK_THREADS": 512,
        "HOST_CLUSTER_X": x,
        "HOST_CLUSTER_Y": y,
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_DEFAULT else [pytest.mark.full])
        for name in (f"{record}, {mode}" for record in ("v32", "dsv4", "v32nope", "v41any") for mode in CLUSTERS)
    ],
)
def test_results_are_those_of_fp64(tmp_path, name):
    record, mode = name.split(", ")
    problems = PROBLEMS[mode]
    if record == "v41any":  # of 528 and of 288 bytes
        problems = ["100 4 2 8 lengths 64 3 97 16f 9 140", "128 3 2 6 sink 7fi 20 70 32i 9 45"]
    KERNEL.check(tmp_path, instance(record, mode), problems)


FAULTS = {
    "share_kv: results over keys on their way to the peer": (
        "mainloop_qk.hpp",
        "if constexpr (AWAITS_COPIES) keys_copied_.wait(barriers_);",
        "",
    ),
    "share_kv: a word too early": (
        "mainloop_qk.hpp",
        "    if constexpr (LAST_BLOCK && AWAITS_COPIES) keys_copied_.tell_peer(barriers_);\n",
        "    if (!LAST_BLOCK && AWAITS_COPIES && first == tile_.first_key) keys_copied_.tell_peer(barriers_);\n"
        "    if (LAST_BLOCK && AWAITS_COPIES && first == tile_.first_key) keys_copied_.tell_peer(barriers_);\n",
    ),
    "share_and_reduce: results over keys on their way to the peer": (
        "cluster/share_and_reduce.hpp",
        "    pv.wait_for_readers();\n",
        "",
    ),
    "reduce_o: results over keys that the peer multiplies": (
        "cluster/reduce_o.hpp",
        "      if (chunk == 0) mbarrier_wait(ClusterReduceO::peer_ring_drained(barriers_), 0);\n",
        "",
    ),
    "reduce_o: the peer's results before they have come": (
        "cluster/reduce_o.hpp",
        "      mbarrier_wait(o_full(tile / CHUNK_TILES), 0);\n",
        "",
    ),
    "reduce_o: the scales of the other split": (
        "cluster/reduce_o.hpp",
        "load_merge_scales<Traits>(shared_, 1, peer);",
        "load_merge_scales<Traits>(shared_, 0, peer);",
    ),
    "reduce_o: queries of which a peer without keys loads none": (
        "producer.hpp",
        "if constexpr (!Cluster::MERGES_SPLITS || Traits::SELECTED)",
        "if (!Cluster::MERGES_SPLITS || half == static_cast<int>(cluster_rank()))",
    ),
}


@KERNEL.each_of(FAULTS, "share_kv: results over keys on their way to the peer")
def test_a_fault_is_found(tmp_path, name):
    mode = name.split(": ")[0]
    more = ["100 20 3 2 lengths 64 3 40", "128 20 1 1 lengths 64 3 60"] if mode == "share_kv" else []
    KERNEL.assert_found(tmp_path, instance("v32", mode), FAULTS[name], PROBLEMS[mode] + more)
