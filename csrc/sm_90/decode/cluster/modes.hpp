// What the instances' constant CLUSTER_MODE names (arch.toml): the types of none.hpp, and the attribute of a kernel's grid.
#pragma once

#include "sm_90/decode/cluster/exchange_p.hpp"
#include "sm_90/decode/cluster/none.hpp"
#include "sm_90/decode/cluster/reduce_four.hpp"
#include "sm_90/decode/cluster/reduce_last.hpp"
#include "sm_90/decode/cluster/reduce_o.hpp"
#include "sm_90/decode/cluster/share_and_reduce.hpp"
#include "sm_90/decode/cluster/share_kv.hpp"

namespace mla::sm_90::cluster_mode {
using none = ClusterNone;
using reduce_o = ClusterReduceO;
using reduce_four = ClusterReduceFour;
using reduce_last = ClusterReduceLast;
using exchange_p = ClusterExchangeP;
using share_kv = ClusterShareKv;
using share_and_reduce = ClusterShareAndReduce;
}  // namespace mla::sm_90::cluster_mode

// A cluster is two or four splits, or two SM parts, of one row tile, or two row tiles, or two of both.
#define MLA_CLUSTER_none
#define MLA_CLUSTER_reduce_o __cluster_dims__(1, 2)
#define MLA_CLUSTER_reduce_four __cluster_dims__(1, 4)
#define MLA_CLUSTER_reduce_last __cluster_dims__(1, 2)
#define MLA_CLUSTER_exchange_p __cluster_dims__(1, 2)
#define MLA_CLUSTER_share_kv __cluster_dims__(2, 1)
#define MLA_CLUSTER_share_and_reduce __cluster_dims__(2, 2)
#define MLA_JOINED(a, b) a##b
#define MLA_CLUSTER_OF(mode) MLA_JOINED(MLA_CLUSTER_, mode)
