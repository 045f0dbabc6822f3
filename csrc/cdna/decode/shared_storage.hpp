// The LDS of a dense decode workgroup: the only place where its size is decided.
//
// The producer's stages and the mainloop's own arrays share the same bytes from the beginning on, as in a union. The
// mainloop writes its arrays (the results that waves exchange) only after the last stage was read.
#pragma once

namespace cdna {

template <class Policy, class Producer, class Mainloop>
struct SharedStorage {
  static constexpr int bytes = Producer::lds_bytes > Mainloop::lds_bytes ? Producer::lds_bytes : Mainloop::lds_bytes;
  static_assert(bytes <= Policy::lds_bytes, "decode: the workgroup needs more LDS than the arch has");
};

}  // namespace cdna
