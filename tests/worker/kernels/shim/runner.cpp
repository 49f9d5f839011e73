// Runs a kernel's library once over buffers that begin or end where addresses fault.
//
// Reads a request from stdin, which chooses the order of threads, and writes the outputs to stdout.
// A fault ends the process with status 3 and one line on stderr. `run.py` writes the request and
// reads the answer.
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "common.h"
#include "fibers.h"
#include "memory.h"

namespace {

using Entry = void (*)(void* const* buffers);

enum class State { RUNNING, WAITING, ENDED };

struct Thread {
  ShimThread about;
  fibers::Fiber fiber;
  State state;
  ShimPoint point;
  const char* what;
  uint32_t line;
  uint32_t group_barriers; // how many it has passed
  uint32_t simd_barriers;  // including those of the group
  unsigned char slot[SHIM_SLOT];
};

std::vector<memory::Buffer> buffers;
std::vector<void*> arguments;
std::vector<Thread> threads; // of the threadgroup that runs
std::vector<unsigned char> slots; // the value that each lane of each simdgroup passed last
char *stacks, *stacks_end;
fibers::Fiber scheduler;
Thread* running;
Entry entry;
char* library_base;
char *shared_begin, *shared_end; // threadgroup memory
unsigned char poison;
unsigned char output_poison;

std::string place_of(const ShimThread& about) {
  char text[128];
  snprintf(text, sizeof text, "thread (%u, %u, %u) of threadgroup (%u, %u, %u)",
           about.position[0], about.position[1], about.position[2],
           about.group[0], about.group[1], about.group[2]);
  return text;
}

// Ends the process. `line` is a line of the kernel's body or 0; `program_counter` is an address in
// its library or null.
[[noreturn]] void fail(uint32_t line, const void* program_counter, const char* format, ...) {
  char text[1024];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  long offset = program_counter ? long((const char*)program_counter - library_base) : -1;
  fprintf(stderr, "FAULT %u %lx %s%s%s\n", line, offset, text, running ? ", by " : "",
          running ? place_of(running->about).c_str() : "");
  fflush(stderr);
  _exit(3);
}

void thread_main() {
  entry(arguments.data());
  running->state = State::ENDED;
  for (;;) {
    fibers::change(running->fiber, scheduler);
  }
}

void wait_here(ShimPoint point, const char* what, uint32_t line) {
  running->state = State::WAITING;
  running->point = point;
  running->what = what;
  running->line = line;
  fibers::change(running->fiber, scheduler);
  running->group_barriers += point == SHIM_GROUP_BARRIER;
  running->simd_barriers += point != SHIM_SIMD_OPERATION;
}

bool same_point(const Thread& a, const Thread& b) {
  return a.state == b.state && (a.state == State::ENDED || (a.point == b.point && a.line == b.line));
}

// Reports that threads in [first, last) are not all at the same point, and ends the process.
[[noreturn]] void fail_divergent(size_t first, size_t last) {
  const Thread* waits = nullptr;
  for (size_t at = first; at < last && !waits; ++at) {
    waits = threads[at].state == State::WAITING ? &threads[at] : nullptr;
  }
  const Thread* other = nullptr;
  size_t there = 0;
  for (size_t at = first; at < last; ++at) {
    if (same_point(threads[at], *waits)) {
      ++there;
    } else if (!other) {
      other = &threads[at];
    }
  }
  char elsewhere[160] = "has ended";
  if (other->state == State::WAITING) {
    snprintf(elsewhere, sizeof elsewhere, "waits at %s on line %u", other->what, other->line);
  }
  running = nullptr;
  fail(waits->line, nullptr, "%s is reached by %zu of %zu threads of a %s: %s %s", waits->what,
       there, last - first, last - first == threads.size() ? "threadgroup" : "simdgroup",
       place_of(other->about).c_str(), elsewhere);
}

void run_thread(Thread& thread) {
  running = &thread;
  shim_thread = &thread.about;
  thread.state = State::RUNNING;
  fibers::change(scheduler, thread.fiber);
  running = nullptr;
}

// Runs a simdgroup until its threads have ended or wait at a barrier of the threadgroup.
void run_simdgroup(size_t first, size_t last, bool descending) {
  for (;;) {
    for (size_t at = first; at < last; ++at) {
      run_thread(threads[descending ? last - 1 - (at - first) : at]);
    }
    for (size_t at = first; at < last; ++at) {
      if (!same_point(threads[at], threads[first])) {
        fail_divergent(first, last);
      }
    }
    const Thread& now = threads[first];
    if (now.state == State::ENDED || now.point == SHIM_GROUP_BARRIER) {
      return;
    }
    if (now.point == SHIM_SIMD_OPERATION) {
      unsigned char* to = &slots[first * SHIM_SLOT];
      memset(to, poison, SHIM_LANES * SHIM_SLOT);
      for (size_t at = first; at < last; ++at) {
        memcpy(to + (at - first) * SHIM_SLOT, threads[at].slot, SHIM_SLOT);
      }
    }
  }
}

void run_group(bool descending) {
  size_t simdgroups = (threads.size() + SHIM_LANES - 1) / SHIM_LANES;
  for (;;) {
    for (size_t place = 0; place < simdgroups; ++place) {
      size_t first = (descending ? simdgroups - 1 - place : place) * SHIM_LANES;
      size_t last = first + SHIM_LANES < threads.size() ? first + SHIM_LANES : threads.size();
      run_simdgroup(first, last, descending);
    }
    for (const Thread& thread : threads) {
      if (!same_point(thread, threads[0])) {
        fail_divergent(0, threads.size());
      }
    }
    if (threads[0].state == State::ENDED) {
      return;
    }
  }
}

} // namespace

#include "races.h"

namespace {

void start_group(const uint32_t (&group)[3], const uint32_t (&full)[3], const uint32_t (&grid)[3],
                 const uint32_t (&groups)[3], bool partial) {
  ShimThread about = {};
  for (int axis = 0; axis < 3; ++axis) {
    uint32_t left = grid[axis] - group[axis] * full[axis];
    about.group[axis] = group[axis];
    about.full_size[axis] = full[axis];
    about.size[axis] = partial && left < full[axis] ? left : full[axis];
    about.groups[axis] = groups[axis];
    about.grid[axis] = grid[axis];
  }
  size_t count = size_t(about.size[0]) * about.size[1] * about.size[2];
  threads.resize(count);
  slots.resize((count + SHIM_LANES) * SHIM_SLOT);
  size_t each = fibers::STACK + memory::page();
  for (size_t at = 0; at < count; ++at) {
    about.index = uint32_t(at);
    about.position[0] = uint32_t(at % about.size[0]);
    about.position[1] = uint32_t(at / about.size[0] % about.size[1]);
    about.position[2] = uint32_t(at / about.size[0] / about.size[1]);
    threads[at].about = about;
    threads[at].group_barriers = threads[at].simd_barriers = 0;
    fibers::start(threads[at].fiber, stacks + at * each + memory::page(), thread_main);
  }
}

void flush_denormals(bool on) {
#if defined(__x86_64__)
  _mm_setcsr(on ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  control = on ? control | (1u << 24) : control & ~(uint64_t(1) << 24);
  asm volatile("msr fpcr, %0" : : "r"(control));
#else
  (void)on;
#endif
}

// The beginning of a request.
struct Request {
  uint32_t grid[3];
  uint32_t threadgroup[3];
  uint32_t partial; // 1: groups at the grid's edge are smaller; 0: they are whole
  uint32_t flush;   // 1: denormal floats are zero
  uint32_t descending;
  uint32_t at_end; // 1: buffers end where addresses fault, 0: they begin there
  uint32_t poison; // a byte that fills threadgroup memory and memory around inputs
  uint32_t output_poison; // a byte that fills outputs, so that unwritten elements are recognized
  uint32_t buffers;
};

struct RequestBuffer {
  uint32_t output;
  uint32_t item;
  uint64_t size;
  char name[112];
};

void read_all(void* to, size_t size) {
  if (size && fread(to, 1, size, stdin) != size) {
    fprintf(stderr, "the request ends early\n");
    exit(2);
  }
}

void run_grid(const Request& request, void (*memory_of)(char**, char**)) {
  uint32_t groups[3];
  for (int axis = 0; axis < 3; ++axis) {
    groups[axis] = (request.grid[axis] + request.threadgroup[axis] - 1) / request.threadgroup[axis];
  }
  memory_of(&shared_begin, &shared_end);
  const size_t shared = size_t(shared_end - shared_begin);
  flush_denormals(request.flush);
  size_t count = size_t(groups[0]) * groups[1] * groups[2];
  for (size_t place = 0; place < count; ++place) {
    size_t at = request.descending ? count - 1 - place : place;
    uint32_t group[3] = {uint32_t(at % groups[0]), uint32_t(at / groups[0] % groups[1]),
                         uint32_t(at / groups[0] / groups[1])};
    memset(shared_begin, int(request.poison), shared);
    races::watch(shared);
    start_group(group, request.threadgroup, request.grid, groups, request.partial);
    run_group(request.descending);
  }
  flush_denormals(false);
}

} // namespace

extern "C" {

const ShimThread* shim_thread;

void shim_wait(ShimPoint point, const char* what, uint32_t line) { wait_here(point, what, line); }

const unsigned char* shim_exchange(const char* what, uint32_t line, const void* in, uint32_t size) {
  memset(running->slot, poison, SHIM_SLOT);
  memcpy(running->slot, in, size);
  wait_here(SHIM_SIMD_OPERATION, what, line);
  return &slots[running->about.index / SHIM_LANES * SHIM_LANES * SHIM_SLOT];
}

void shim_fail(const char* message) {
  fail(0, static_cast<const char*>(__builtin_return_address(0)) - 1, "%s", message);
}
}

#include "checks.h"
#include "signals.h"

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  entry = reinterpret_cast<Entry>(dlsym(library, "shim_entry"));
  auto memory_of = reinterpret_cast<void (*)(char**, char**)>(
      dlsym(library, "shim_threadgroup_memory"));
  Dl_info about;
  dladdr(reinterpret_cast<void*>(entry), &about);
  library_base = static_cast<char*>(about.dli_fbase);
  stacks = fibers::stacks(1024);
  stacks_end = stacks + 1024 * (fibers::STACK + memory::page());
  catch_faults();

  Request request;
  read_all(&request, sizeof request);
  poison = static_cast<unsigned char>(request.poison);
  output_poison = static_cast<unsigned char>(request.output_poison);
  for (uint32_t at = 0; at < request.buffers; ++at) {
    RequestBuffer told;
    read_all(&told, sizeof told);
    memory::Buffer buffer = {told.name, told.output != 0, told.item, told.size, nullptr, 0, nullptr};
    memory::place(buffer, request.at_end);
    std::string data(buffer.output ? 0 : buffer.size, 0);
    read_all(data.data(), data.size());
    memory::fill(buffer, data.data(), buffer.output ? output_poison : poison);
    buffers.push_back(buffer);
    arguments.push_back(buffer.data);
  }
  for (const memory::Buffer& buffer : buffers) {
    if (buffer.output) {
      races::outputs.push_back({&buffer, std::vector<uint64_t>((buffer.size + 1) / 2)});
    }
  }
  races::watching = !request.descending;
  run_grid(request, memory_of);
  races::watching = false;
  for (const memory::Buffer& buffer : buffers) {
    if (!buffer.output) {
      continue;
    }
    if (const char* at = memory::touched(buffer, output_poison)) {
      fail(0, nullptr, "writes %s", memory::describe(buffers, at).c_str());
    }
    fwrite(buffer.data, 1, buffer.size, stdout);
  }
  return 0;
}
