// The interface between a kernel compiled as C++ and the program that runs it (runner.cpp).
//
// Threads of a threadgroup are fibers: each runs until it waits or ends. `shim_thread` is the
// running thread; the runner sets it at every switch.
#pragma once

// Kernels are compiled without optimization. The functions of these headers are optimized, up to
// the pop_options at the end of metal.h and cuda.h.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif

#include <bit>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

struct ShimThread {
  uint32_t position[3];  // in the threadgroup
  uint32_t group[3];     // the threadgroup's, in the grid of threadgroups
  uint32_t size[3];      // of this threadgroup: smaller at the grid's edge on Metal
  uint32_t full_size[3]; // of a threadgroup inside the grid
  uint32_t groups[3];    // threadgroups of the grid
  uint32_t grid[3];      // threads of the grid
  uint32_t index;        // of the thread in its threadgroup
};

enum ShimPoint : uint32_t { SHIM_GROUP_BARRIER, SHIM_SIMD_BARRIER, SHIM_SIMD_OPERATION };

constexpr uint32_t SHIM_LANES = 32;
constexpr uint32_t SHIM_SLOT = 32; // bytes that a lane can pass to the others

extern "C" {
// The thread that runs.
extern const ShimThread* shim_thread;
// Waits until all threads of the group, or all lanes of the simdgroup, have reached this point.
void shim_wait(ShimPoint point, const char* what, uint32_t line);
// Waits for all lanes of the simdgroup. Each passes a value; returns all values, a slot per lane.
const unsigned char* shim_exchange(const char* what, uint32_t line, const void* in, uint32_t size);
// Ends the run with a message.
[[noreturn]] void shim_fail(const char* message);
}

// The values that the lanes of the caller's simdgroup pass. Lanes that do not exist hold poison.
template <typename T>
struct ShimLanes {
  T values[SHIM_LANES];

  ShimLanes(const char* what, uint32_t line, T value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= SHIM_SLOT);
    const unsigned char* slots = shim_exchange(what, line, &value, sizeof(T));
    for (uint32_t lane = 0; lane < SHIM_LANES; ++lane) {
      std::memcpy(&values[lane], slots + lane * SHIM_SLOT, sizeof(T));
    }
  }

  // Reduces the values of existing lanes in the order of a tree, as a reduction by shuffles does.
  template <typename F>
  T reduced(F join) {
    const ShimThread& now = *shim_thread;
    uint32_t threads = now.size[0] * now.size[1] * now.size[2];
    uint32_t lanes = threads - now.index / SHIM_LANES * SHIM_LANES;
    for (uint32_t step = SHIM_LANES / 2; step > 0; step /= 2) {
      for (uint32_t lane = 0; lane < step; ++lane) {
        if (lane + step < lanes) {
          values[lane] = join(values[lane], values[lane + step]);
        }
      }
    }
    return values[0];
  }
};

inline uint32_t shim_lane() { return shim_thread->index % SHIM_LANES; }

inline float shim_from_bfloat(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

// Rounds to nearest, ties to even. NaN stays NaN.
inline uint16_t shim_to_bfloat(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return uint16_t(bits >> 16 | 0x40);
  }
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__FLT16_MANT_DIG__)
using ShimHalf = _Float16;
#else
#error "half needs _Float16: g++ 12 or newer on x86-64, 13 or newer on aarch64, or clang"
#endif

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()

// Returns the bounds of threadgroup memory: its arrays are the library's only variables.
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];
extern "C" inline __attribute__((used)) void shim_threadgroup_memory(char** begin, char** end) {
  *begin = __bss_start;
  *end = _end;
}
