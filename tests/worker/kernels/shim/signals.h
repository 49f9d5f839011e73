// Reports accesses that fault as messages.
#pragma once

namespace {

void on_fault(int signal, siginfo_t* about, void* context) {
  const void* at = nullptr;
  const char* does = "accesses";
#if defined(__x86_64__)
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  at = reinterpret_cast<void*>(registers[REG_RIP]);
  does = registers[REG_ERR] & 2 ? "writes" : "reads";
#elif defined(__aarch64__)
  at = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
  if (signal == SIGSEGV || signal == SIGBUS) {
    const char* address = static_cast<const char*>(about->si_addr);
    if (address >= stacks && address < stacks_end) {
      fail(0, at, "a thread's local variables need more than %zu bytes", fibers::STACK);
    }
    std::string where = memory::describe(buffers, address);
    bool input = where.compare(0, 6, "writes") == 0;
    fail(0, at, "%s%s%s", input ? "" : does, input ? "" : " ", where.c_str());
  }
  fail(0, at, "signal %d", signal);
}

void catch_faults() {
  stack_t other = {};
  other.ss_size = 256 << 10;
  other.ss_sp = malloc(other.ss_size);
  sigaltstack(&other, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP}) {
    sigaction(signal, &action, nullptr);
  }
}

} // namespace
