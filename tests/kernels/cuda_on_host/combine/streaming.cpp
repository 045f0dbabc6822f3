// Runs a streaming combine on a CPU, block by block, while decode stores its partials in any order:
//
//   streaming PROBLEM RESULTS SEED
//
// merge_host.hpp has the formats. Words of partials that are SENTINEL are not stored by decode.
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
  Merge merge(argv[1]);
  params = merge.params, of_decode = merge.partial_out;
  of_decode.insert(of_decode.end(), merge.partial_lse.begin(), merge.partial_lse.end());
  partials.assign(of_decode.size(), mla::sm_90::SENTINEL);
  params.partial_out = at<float>(partials);
  params.partial_lse = params.partial_out + merge.partial_out.size();
  const uint32_t seed = static_cast<uint32_t>(std::atoi(argv[3]));
  order.seed(seed);
  for (size_t i = 0; i < of_decode.size(); ++i)
    if (of_decode[i] != mla::sm_90::SENTINEL) to_store.push_back(i);
  std::shuffle(to_store.begin(), to_store.end(), order);
  Block block(seed);
  for (unsigned i = 0; i < merge.blocks; ++i) {
    mla::sm_90::waits = 0;
    blockIdx = {(i + seed) % merge.blocks, 0, 0};
    if (!block.run(run_kernel)) fail("threads wait for what never comes, in block", blockIdx.x);
    if (mla::sm_90::waits != BLOCK_THREADS) fail("threads that waited for decode:", mla::sm_90::waits);
  }
  merge.save(argv[2]);
}
