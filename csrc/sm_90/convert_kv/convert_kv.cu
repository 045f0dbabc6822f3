// convert_kv on sm_90: the entry. SOURCE and DESTINATION are elements of elements.hpp.
#include "sm_90/convert_kv/kernel.hpp"

namespace {
using Kernel = mla::sm_90::ConvertKv<mla::sm_90::stored::SOURCE, mla::sm_90::stored::DESTINATION>;
}

MLA_KERNEL(Kernel::threads, Kernel::min_waves) void MLA_SUITE_KERNEL(mla::ConvertKvParams p) { Kernel::run(p); }
