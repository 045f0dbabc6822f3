// Runs plan's launches for the problems of a file and writes the words of their plans into another.
//
//   plan PROBLEMS PLANS SEED
//
// A problem is of 32-bit words: sequences, whether cu_seqlens_q is there, words of the plan, launches, words of the
// parameters; of each launch its kernel's number in KERNELS, blocks and threads; then the parameters, lengths and
// cu_seqlens_q.
#include "cuda.hpp"

#include "block.hpp"
#include "common/params/plan.hpp"

#include <csignal>

#define KERNEL(name) extern "C" void name(mla::PlanParams);
KERNELS
#undef KERNEL

namespace {

struct {
  const char* name;
  void (*run)(mla::PlanParams);
} const kernels[] = {
#define KERNEL(name) {#name, name},
    KERNELS
#undef KERNEL
};

extern "C" char __bss_start[], _end[];  // the blocks' shared memory lies between

mla::PlanParams params;
void (*kernel)(mla::PlanParams);
void run_kernel() { kernel(params); }

using Words = std::vector<int32_t>;

Words read_all(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) host::fail("no file of problems", 0);
  Words words;
  int32_t word;
  while (std::fread(&word, 4, 1, file) == 1) words.push_back(word);
  std::fclose(file);
  return words;
}

struct Launch {
  int32_t kernel, blocks, threads;
};

// An array of exactly its words, so that what lies beside it is nobody's.
struct Array {
  explicit Array(size_t words)
      : words(words), at(static_cast<int32_t*>(std::aligned_alloc(64, (words * 4 + 127) / 64 * 64))) {}
  ~Array() { std::free(at); }
  size_t words;
  int32_t* at;
};

void launch(host::Block& block, const Launch& what) {
  host::step = kernels[what.kernel].name;
  kernel = kernels[what.kernel].run;
  host::launch_began = host::now + 1;
  for (int i = 0; i < what.blocks; ++i) {
    host::block = static_cast<unsigned>(i);
    block.run(what.threads, run_kernel);
  }
  host::first_launch = false;
}

void undefined(int) { host::fail("undefined behaviour: a bound, an overflow, a shift or a division; signal", SIGILL); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 1;
  std::signal(SIGILL, undefined);
  const Words words = read_all(argv[1]);
  std::FILE* plans = std::fopen(argv[2], "wb");
  host::Block block(static_cast<uint32_t>(std::atoi(argv[3])));
  const int32_t* at = words.data();
  for (; at < words.data() + words.size(); ++host::problem) {
    const int32_t batch = at[0], has_queries = at[1], plan_words = at[2], launches = at[3], param_words = at[4];
    at += 5;
    const Launch* each = reinterpret_cast<const Launch*>(at);
    at += 3 * launches;
    if (param_words * 4 != sizeof params) host::fail("parameters of words", param_words);
    std::memcpy(&params, at, sizeof params);
    at += param_words;
    Array lens(batch), queries(has_queries ? batch + 1 : 0), plan(plan_words);
    std::memcpy(lens.at, at, lens.words * 4);
    at += lens.words;
    std::memcpy(queries.at, at, queries.words * 4);
    at += queries.words;
    for (size_t i = 0; i < plan.words; ++i) plan.at[i] = 0x5eadbeef;
    params.seq_lens = lens.at;
    params.cu_seqlens_q = has_queries ? queries.at : nullptr;
    params.plan = plan.at;

    host::memories.clear();
    host::memories.emplace_back(__bss_start, static_cast<size_t>(_end - __bss_start), false, true);
    host::memories.emplace_back(lens.at, lens.words * 4, true, false);
    host::memories.emplace_back(queries.at, queries.words * 4, true, false);
    host::memories.emplace_back(plan.at, plan.words * 4, true, true);
    host::first_launch = true;
    for (int i = 0; i < launches; ++i) launch(block, each[i]);
    for (size_t i = 0; i < plan.words; ++i)
      if (host::memories.back().words[i].written < host::launch_began)
        host::fail("the last launch has not written the plan's word", static_cast<long>(i));
    std::fwrite(plan.at, 4, plan.words, plans);
  }
  std::fclose(plans);
  std::printf("%ld problems\n", host::problem);
}
