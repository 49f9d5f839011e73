// Finds races at the access that causes them: kernels call these functions before each access to
// memory that several threads may see (-fsanitize=thread). Only barriers order two accesses, not
// shuffles and reductions.
#pragma once

namespace races {

// The thread that used two bytes of threadgroup memory, and how many barriers it had passed.
struct Access {
  uint32_t thread; // its index + 1; 0: none yet
  uint32_t group_barriers;
  uint32_t simd_barriers; // including those of the group
};

struct Pair {
  Access write;
  Access read;        // the newest read
  Access near_read;   // the newest by another thread of the same simdgroup
  Access remote_read; // the newest by a different simdgroup
};

struct Output {
  const memory::Buffer* buffer;
  std::vector<uint64_t> users; // for each pair of bytes, the thread that uses it; 0: none yet
};

bool watching; // in one of the two runs of a launch, which is enough
std::vector<Pair> shared; // memory of the threadgroup that runs
std::vector<Output> outputs;

uint32_t simdgroup_of(const Access& one) { return (one.thread - 1) / SHIM_LANES; }

bool ordered(const Access& before, const Access& now) {
  return !before.thread || before.thread == now.thread ||
         before.group_barriers < now.group_barriers ||
         (simdgroup_of(before) == simdgroup_of(now) && before.simd_barriers < now.simd_barriers);
}

// `before` is an access by a thread of the threadgroup that runs.
[[noreturn]] void fail_shared(const Access& before, bool wrote, bool writes, const void* at) {
  std::string other = place_of(threads[before.thread - 1].about);
  fail(0, at, "race: %s threadgroup memory that %s has %s, with no barrier between",
       writes ? "writes to" : "reads", other.c_str(), wrote ? "written" : "read");
}

void touch_shared(size_t first, size_t size, bool writes, const void* at) {
  const Access now = {running->about.index + 1, running->group_barriers, running->simd_barriers};
  for (size_t place = first / 2; place < (first + size + 1) / 2; ++place) {
    Pair& pair = shared[place];
    if (!ordered(pair.write, now)) {
      fail_shared(pair.write, true, writes, at);
    }
    if (writes) {
      for (const Access& read : {pair.read, pair.near_read, pair.remote_read}) {
        if (!ordered(read, now)) {
          fail_shared(read, false, true, at);
        }
      }
      pair.write = now;
    } else if (pair.read.thread != now.thread) {
      bool near = pair.read.thread && simdgroup_of(pair.read) == simdgroup_of(now);
      (near ? pair.near_read : pair.remote_read) = pair.read;
      pair.read = now;
    } else {
      pair.read = now;
    }
  }
}

// Two bytes of an output may be used by one thread only: barriers do not order device memory here.
void touch_output(Output& output, size_t first, size_t size, const void* at) {
  const ShimThread& about = running->about;
  const uint64_t row = about.group[1] + uint64_t(about.groups[1]) * about.group[2];
  const uint64_t now = (about.group[0] + about.groups[0] * row) * 1024 + about.index + 1;
  for (size_t place = first / 2; place < (first + size + 1) / 2; ++place) {
    uint64_t& user = output.users[place];
    if (user && user != now) {
      fail(0, at, "race: two threads use byte %zu of output '%s'", place * 2,
           output.buffer->name.c_str());
    }
    user = now;
  }
}

void watch(size_t shared_bytes) {
  if (watching) {
    shared.assign((shared_bytes + 1) / 2, {});
  }
}

inline void touch(const void* address, size_t size, bool writes, const void* at) {
  const char* place = static_cast<const char*>(address);
  if (!watching || (place >= stacks && place < stacks_end)) {
    return;
  }
  if (place >= shared_begin && place + size <= shared_end) {
    touch_shared(size_t(place - shared_begin), size, writes, at);
    return;
  }
  for (Output& output : outputs) {
    const char* begin = output.buffer->data;
    if (place >= begin && place + size <= begin + output.buffer->size) {
      touch_output(output, size_t(place - begin), size, at);
    }
  }
}

} // namespace races

// An address in the call itself, because the return address may belong to the next line.
#define SHIM_CALLER (static_cast<const char*>(__builtin_return_address(0)) - 1)
#define SHIM_ACCESS(size)                                                  \
  void __tsan_read##size(void* at) {                                       \
    races::touch(at, size, false, SHIM_CALLER);                            \
  }                                                                        \
  void __tsan_write##size(void* at) {                                      \
    races::touch(at, size, true, SHIM_CALLER);                             \
  }                                                                        \
  void __tsan_unaligned_read##size(void* at) {                             \
    races::touch(at, size, false, SHIM_CALLER);                            \
  }                                                                        \
  void __tsan_unaligned_write##size(void* at) {                            \
    races::touch(at, size, true, SHIM_CALLER);                             \
  }

extern "C" {
SHIM_ACCESS(1)
SHIM_ACCESS(2)
SHIM_ACCESS(4)
SHIM_ACCESS(8)
SHIM_ACCESS(16)
void __tsan_read_range(void* at, size_t size) {
  races::touch(at, size, false, SHIM_CALLER);
}
void __tsan_write_range(void* at, size_t size) {
  races::touch(at, size, true, SHIM_CALLER);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
#undef SHIM_ACCESS
