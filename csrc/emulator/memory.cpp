#include "memory.hpp"

namespace emulator {

static bool holds(const View& view, u64 address, u32 bytes) {
  u64 offset = address - view.base;
  if (address < view.base || offset >= view.span || bytes > view.span - offset) return false;
  if (!view.dimensions) return true;
  for (int d = 0; d < view.dimensions; d++) {
    u64 index = offset / u64(view.stride[d]);
    if (index >= u64(view.size[d])) return false;
    offset -= index * u64(view.stride[d]);
    // The innermost dimension is the bytes that follow each other; behind them a hole begins, or another view.
    if (d == view.dimensions - 1 && bytes > u64(view.size[d]) - index) return false;
  }
  return true;
}

void Memory::open(const View* list, u32 count) {
  views = list;
  view_count = count;
  order = allocate<u32>(count);
  regions = allocate<Region>(count);
  region_count = 0;
  for (u32 i = 0; i < count; i++) {
    u32 at = i;
    for (; at > 0 && views[order[at - 1]].base > views[i].base; at--) order[at] = order[at - 1];
    order[at] = i;
  }
  for (u32 i = 0; i < count; i++) {
    const View& view = views[order[i]];
    Region* last = region_count ? &regions[region_count - 1] : nullptr;
    if (last && view.base < last->high) {
      if (view.base + view.span > last->high) last->high = view.base + view.span;
      last->count++;
    } else {
      regions[region_count++] = Region{view.base, view.base + view.span, nullptr, i, 1, false};
    }
  }
  for (u32 r = 0; r < region_count; r++) {
    Region& region = regions[r];
    region.simple = region.count == 1 && !views[order[region.first]].dimensions;
    bool written = false;
    for (u32 i = 0; i < region.count; i++) written |= (views[order[region.first + i]].access & WRITE) != 0;
    if (written) region.tags = allocate<u32>(region.high - region.low);
  }
}

void Memory::close() {
  for (u32 r = 0; r < region_count; r++) free(regions[r].tags);
  free(regions);
  free(order);
}

Region* Memory::region_of(u64 address) const {
  u32 low = 0, high = region_count;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (regions[middle].high <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low < region_count && regions[low].low <= address ? &regions[low] : nullptr;
}

int Memory::view_of(const Region& region, u64 address, u32 bytes, int access, bool* inside) const {
  *inside = false;
  for (u32 i = 0; i < region.count; i++) {
    u32 index = order[region.first + i];
    if (!holds(views[index], address, bytes)) continue;
    *inside = true;
    if ((access & WRITE) && !(views[index].access & WRITE)) continue;
    return int(index);
  }
  return -1;
}

bool Memory::starts_initialised(const Region& region, u64 address) const {
  for (u32 i = 0; i < region.count; i++) {
    const View& view = views[order[region.first + i]];
    if ((view.access & READ) && holds(view, address, 1)) return true;
  }
  return false;
}

u64 Memory::unwritten(const View& view, u64* first) const {
  const Region& region = *region_of(view.base);
  const int inner = view.dimensions - 1;  // the bytes of the innermost dimension follow each other
  const u64 run = view.dimensions ? u64(view.size[inner]) : view.span;
  i64 index[MAX_DIMENSIONS] = {};
  u64 missing = 0;
  while (true) {
    u64 at = view.base;
    for (int d = 0; d < inner; d++) at += u64(index[d] * view.stride[d]);
    for (u64 i = 0; i < run; i++)
      if (!region.tags[at + i - region.low] && !missing++) *first = at + i;
    int d = inner - 1;
    while (d >= 0 && ++index[d] == view.size[d]) index[d--] = 0;
    if (d < 0) return missing;
  }
}

}  // namespace emulator
