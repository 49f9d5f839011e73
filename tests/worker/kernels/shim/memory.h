// Device memory: every buffer lies between two ranges of addresses that fault.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace memory {

// Bytes of addresses that fault on either side, enough to catch most wrong strides.
constexpr size_t GUARD = 64 << 20;
// Bytes to which MLX aligns its allocations at least.
constexpr size_t ALIGNMENT = 16;

struct Buffer {
  std::string name;
  bool output;
  size_t item;   // bytes of an element
  size_t size;   // bytes
  char* mapping; // its first byte that does not fault
  size_t mapped;
  char* data;
};

inline size_t page() { return size_t(sysconf(_SC_PAGESIZE)); }

// Places a buffer so that it begins, or ends up to alignment, where addresses fault.
inline void place(Buffer& buffer, bool at_end) {
  buffer.mapped = (buffer.size + page() - 1) / page() * page();
  int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* all = mmap(nullptr, buffer.mapped + 2 * GUARD, PROT_NONE, kind, -1, 0);
  if (all == MAP_FAILED) {
    fprintf(stderr, "no address space for buffer '%s'\n", buffer.name.c_str());
    exit(2);
  }
  buffer.mapping = static_cast<char*>(all) + GUARD;
  if (buffer.mapped) {
    mprotect(buffer.mapping, buffer.mapped, PROT_READ | PROT_WRITE);
  }
  size_t rounded = (buffer.size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  buffer.data = buffer.mapping + (at_end ? buffer.mapped - rounded : 0);
}

inline void fill(Buffer& buffer, const char* data, unsigned char poison) {
  memset(buffer.mapping, poison, buffer.mapped);
  if (!buffer.output) {
    memcpy(buffer.data, data, buffer.size);
    mprotect(buffer.mapping, buffer.mapped, PROT_READ);
  }
}

// Returns the first byte around a buffer that is no longer poison, or null.
inline const char* touched(const Buffer& buffer, unsigned char poison) {
  for (const char* at = buffer.mapping; at < buffer.mapping + buffer.mapped; ++at) {
    bool inside = at >= buffer.data && at < buffer.data + buffer.size;
    if (!inside && static_cast<unsigned char>(*at) != poison) {
      return at;
    }
  }
  return nullptr;
}

// Describes an address that faulted.
inline std::string describe(const std::vector<Buffer>& buffers, const char* address) {
  char text[256];
  for (const Buffer& buffer : buffers) {
    const char* end = buffer.mapping + buffer.mapped;
    if (address < buffer.mapping - GUARD || address >= end + GUARD) {
      continue;
    }
    long offset = long(address - buffer.data);
    long size = long(buffer.size);
    const char* where = offset < 0 ? "before the beginning of" : "behind the end of";
    if (offset >= 0 && offset < size) {
      snprintf(text, sizeof text, "writes to input '%s'", buffer.name.c_str());
    } else {
      snprintf(text, sizeof text, "%s buffer '%s': byte %ld, element %ld of %ld (%zu bytes each)",
               where, buffer.name.c_str(), offset, offset / long(buffer.item),
               size / long(buffer.item), buffer.item);
    }
    return text;
  }
  snprintf(text, sizeof text, "at address %p, which is in or near no buffer", (const void*)address);
  return text;
}

} // namespace memory
