// Runs a resident combine on a CPU, block by block:
//
//   combine PROBLEM RESULTS SEED
//
// merge_host.hpp has the formats. Until a thread of a block has waited for decode, partials are NaN.
#include "merge_host.hpp"

#include "sm_90/combine/resident_combine.cu"

namespace {

mla::CombineParams params;
Words partial_out, partial_lse, of_out, of_lse;

void run_kernel() { MLA_SUITE_KERNEL(params); }

}  // namespace

void mla::sm_90::end_previous_kernel() {
  partial_out = of_out;
  partial_lse = of_lse;
}

int main(int, char** argv) {
  Merge merge(argv[1]);
  params = merge.params, of_out = merge.partial_out, of_lse = merge.partial_lse;
  partial_out.resize(of_out.size()), partial_lse.resize(of_lse.size());
  params.partial_out = at<float>(partial_out);
  params.partial_lse = at<float>(partial_lse);
  Block block(static_cast<uint32_t>(std::atoi(argv[3])));
  for (unsigned i = 0; i < merge.blocks; ++i) {
    std::fill(partial_out.begin(), partial_out.end(), ~0u);
    std::fill(partial_lse.begin(), partial_lse.end(), ~0u);
    mla::sm_90::waits = 0;
    blockIdx = {i, 0, 0};
    if (!block.run(run_kernel)) fail("threads wait for what never comes, in block", i);
    if (i == 0 && mla::sm_90::waits == 0) fail("nothing has waited for decode", 0);
  }
  merge.save(argv[2]);
}
