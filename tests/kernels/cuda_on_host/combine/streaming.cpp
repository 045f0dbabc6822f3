// Runs a streaming combine on a CPU, block by block, while decode stores its partials in any order:
//
//   streaming PROBLEM RESULTS SEED
//
// A problem is of 32-bit words: blocks, words of the parameters without addresses, words of partial_out, partial_lse,
// attn_sink, out, lse; then the parameters and all of these, out and lse included. Words of partials that are SENTINEL are
// not stored by decode. Results are out and lse.
#include "merge_host.hpp"

void decode_goes_on();
inline void __nanosleep(unsigned) { decode_goes_on(); }

#include "sm_90/combine/streaming_combine.cu"

namespace {

mla::CombineParams params;
Words partials, of_decode;  // partial_out, then partial_lse
std::vector<size_t> to_store;
std::mt19937 order;

void store_some(size_t most) {
  for (; most != 0 && !to_store.empty(); --most) {
    const size_t at = to_store.back();
    to_store.pop_back();
    if (partials[at] != mla::sm_90::SENTINEL) fail("decode finds no sentinel at word", static_cast<long>(at));
    partials[at] = of_decode[at];
    ++events;
  }
}

void run_kernel() { MLA_SUITE_KERNEL(params); }

}  // namespace

void decode_goes_on() {
  store_some(order() % (to_store.size() / 4 + 2));
  yield();
}
void mla::sm_90::end_previous_kernel() { store_some(to_store.size()); }

int main(int, char** argv) {
  std::FILE* file = std::fopen(argv[1], "rb");
  const Words sizes = take(file, 7);
  const Words packed = take(file, sizes[1]);
  if (packed.size() * 4 != sizeof params) fail("parameters of words", sizes[1]);
  std::memcpy(&params, packed.data(), sizeof params);
  of_decode = take(file, sizes[2] + sizes[3]);
  Words sink = take(file, sizes[4]), out = take(file, sizes[5]), lse = take(file, sizes[6]);
  partials.assign(of_decode.size(), mla::sm_90::SENTINEL);
  params.partial_out = at<float>(partials);
  params.partial_lse = params.partial_out + sizes[2];
  params.split_indptr = nullptr;
  params.cu_seqlens_q = nullptr;
  params.attn_sink = at<float>(sink);
  params.out = at<void>(out);
  params.lse = at<float>(lse);
  const uint32_t seed = static_cast<uint32_t>(std::atoi(argv[3]));
  order.seed(seed);
  for (size_t i = 0; i < of_decode.size(); ++i)
    if (of_decode[i] != mla::sm_90::SENTINEL) to_store.push_back(i);
  std::shuffle(to_store.begin(), to_store.end(), order);
  Block block(seed);
  for (unsigned i = 0; i < sizes[0]; ++i) {
    mla::sm_90::waits = 0;
    blockIdx = {(i + seed) % sizes[0], 0, 0};
    if (!block.run(run_kernel)) fail("threads wait for what never comes, in block", blockIdx.x);
    if (mla::sm_90::waits != BLOCK_THREADS) fail("threads that waited for decode:", mla::sm_90::waits);
  }
  std::FILE* results = std::fopen(argv[2], "wb");
  std::fwrite(out.data(), 4, out.size(), results);
  std::fwrite(lse.data(), 4, lse.size(), results);
  std::fclose(results);
}
