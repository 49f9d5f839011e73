// Stacks to switch between: a few instructions on x86-64 and aarch64, ucontext elsewhere.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#define SHIM_UCONTEXT 1
#endif

namespace fibers {

// Bytes of a stack. It holds the arrays that GPUs keep in registers. A page below it faults.
constexpr size_t STACK = 256 << 10;

struct Fiber {
#if SHIM_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer;
#endif
};

#if SHIM_UCONTEXT

inline void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

inline void start(Fiber& fiber, char* stack, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#else

// Saves callee-saved registers and the stack pointer, and continues on the other stack.
extern "C" void shim_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.globl shim_switch
.hidden shim_switch
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr int SAVED = 6; // words of saved registers; the return address is above them
constexpr int RETURN = 6;
#else
asm(R"(
.text
.globl shim_switch
.hidden shim_switch
shim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr int SAVED = 20;
constexpr int RETURN = 11;
#endif

inline void change(Fiber& from, Fiber& to) { shim_switch(&from.stack_pointer, to.stack_pointer); }

inline void start(Fiber& fiber, char* stack, void (*entry)()) {
  // With two more words, the stack is aligned as at the entry of a function.
  void** top = reinterpret_cast<void**>(stack + STACK) - SAVED - 2;
  for (int word = 0; word < SAVED + 2; ++word) {
    top[word] = nullptr;
  }
  top[RETURN] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = top;
}

#endif

// Allocates this many stacks. Stack n begins at n * (STACK + page) + page.
inline char* stacks(size_t count) {
  size_t page = size_t(sysconf(_SC_PAGESIZE));
  size_t each = STACK + page;
  int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* found = mmap(nullptr, count * each, PROT_READ | PROT_WRITE, kind, -1, 0);
  if (found == MAP_FAILED) {
    abort();
  }
  for (size_t at = 0; at < count; ++at) {
    mprotect(static_cast<char*>(found) + at * each, page, PROT_NONE);
  }
  return static_cast<char*>(found);
}

} // namespace fibers
