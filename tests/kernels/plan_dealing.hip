// plan with sequences dealt out of order, which only sm_90 does, for a GPU that can be emulated.
#include "cdna/common/wave.hpp"
#include "common/plan.hpp"

using Search = mla::Plan<cdna::Wave<true>, 4, true>;
using Balanced = mla::Plan<cdna::Wave<true>, 8, true>;

MLA_KERNEL(Search::threads, Search::min_waves) void search(mla::PlanParams p) { Search::search(p); }
MLA_KERNEL(Balanced::threads, Balanced::min_waves) void balanced(mla::PlanParams p) { Balanced::balanced(p); }
