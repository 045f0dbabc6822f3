// Runs the combine of the file COMBINE, behind a decode with a plan, on a CPU, block by block:
//
//   combine PROBLEM RESULTS SEED
//
// A problem is of 32-bit words: blocks, words of the parameters without addresses, words of partial_out, partial_lse,
// the plan, cu_seqlens_q, attn_sink, out, lse; then the parameters and all of these, out and lse included. Results are
// out and lse. Until a thread of a block has waited for decode, partials are NaN.
#include "merge_host.hpp"

#include COMBINE

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
  std::FILE* file = std::fopen(argv[1], "rb");
  const Words sizes = take(file, 9);
  const Words packed = take(file, sizes[1]);
  if (packed.size() * 4 != sizeof params) fail("parameters of words", sizes[1]);
  std::memcpy(&params, packed.data(), sizeof params);
  of_out = take(file, sizes[2]), of_lse = take(file, sizes[3]);
  Words plan = take(file, sizes[4]), tokens = take(file, sizes[5]), sink = take(file, sizes[6]);
  Words out = take(file, sizes[7]), lse = take(file, sizes[8]);
  partial_out.resize(of_out.size()), partial_lse.resize(of_lse.size());
  params.partial_out = at<float>(partial_out);
  params.partial_lse = at<float>(partial_lse);
  params.split_indptr = at<int32_t>(plan) + 16;
  params.cu_seqlens_q = at<int32_t>(tokens);
  params.attn_sink = at<float>(sink);
  params.out = at<void>(out);
  params.lse = at<float>(lse);
  Block block(static_cast<uint32_t>(std::atoi(argv[3])));
  for (unsigned i = 0; i < sizes[0]; ++i) {
    std::fill(partial_out.begin(), partial_out.end(), ~0u);
    std::fill(partial_lse.begin(), partial_lse.end(), ~0u);
    mla::sm_90::waits = 0;
    blockIdx = {i, 0, 0};
    if (!block.run(run_kernel)) fail("threads wait for what never comes, in block", i);
    if (i == 0 && mla::sm_90::waits == 0) fail("nothing has waited for decode", 0);
  }
  std::FILE* results = std::fopen(argv[2], "wb");
  std::fwrite(out.data(), 4, out.size(), results);
  std::fwrite(lse.data(), 4, lse.size(), results);
  std::fclose(results);
}
