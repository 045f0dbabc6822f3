// convert_kv by the source of csrc/sm_90/convert_kv on a CPU, one block after the other. Arguments: the names
// of elements.hpp that are read and written and the number of blocks, then files of ConvertKvParams, whose addresses are
// set here, the source, the destination, the slots of both, and where there are any the descales of both. The destination
// is written back.
#include "caches_in_files.hpp"

#include "sm_90/convert_kv/kernel.hpp"

namespace {

namespace stored = mla::sm_90::stored;

mla::ConvertKvParams params;

template <class From, class To>
void kernel() {
  mla::sm_90::ConvertKv<From, To>::run(params);
}

using Kernel = void (*)();

template <class From>
Kernel kernel_to(const std::string& to) {
  if (to == "bf16") return kernel<From, stored::bf16>;
  if (to == "fp16") return kernel<From, stored::fp16>;
  if (to == "fp32") return kernel<From, stored::fp32>;
  if (to == "e4m3") return kernel<From, stored::e4m3>;
  if (to == "e4m3fnuz") return kernel<From, stored::e4m3fnuz>;
  return kernel<From, stored::e2m1>;
}

Kernel kernel_of(const std::string& from, const std::string& to) {
  if (from == "bf16") return kernel_to<stored::bf16>(to);
  if (from == "fp16") return kernel_to<stored::fp16>(to);
  if (from == "fp32") return kernel_to<stored::fp32>(to);
  if (from == "e4m3") return kernel_to<stored::e4m3>(to);
  if (from == "e4m3fnuz") return kernel_to<stored::e4m3fnuz>(to);
  return kernel_to<stored::e2m1>(to);
}

}  // namespace

int main(int count, char** names) {
  size_t bytes, cache_bytes;
  std::memcpy(&params, read(names[4], bytes), sizeof params);
  params.source = read(names[5], bytes);
  params.destination = read(names[6], cache_bytes);
  params.source_slots = read(names[7], bytes);
  params.destination_slots = read(names[8], bytes);
  const auto descale = [&](int i) {
    return i < count && names[i][0] != '-' ? reinterpret_cast<const float*>(read(names[i], bytes)) : nullptr;
  };
  params.source_descale = descale(9);
  params.destination_descale = descale(10);
  Block block(1);
  for (blockIdx.x = 0; static_cast<int>(blockIdx.x) < std::atoi(names[3]); ++blockIdx.x)
    if (!block.run(kernel_of(names[1], names[2]))) return 1;
  std::ofstream(names[6], std::ios::binary).write(reinterpret_cast<const char*>(params.destination), cache_bytes);
}
