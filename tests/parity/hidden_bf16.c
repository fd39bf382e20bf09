// Preloaded, it lets a process believe that its CPU has AVX512_BF16. Virtual machines hide it from
// CPUID where the hardware could do it, and oneDNN asks CPUID: here that instruction is made to
// fault (arch_prctl), and the answer is changed. On hardware without it, the first product is an
// illegal instruction.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { kSetCpuid = 0x1012, kNotPossible = 77 };  // ARCH_SET_CPUID; the test's exit code for a skip

static long let_cpuid_run(long allowed) { return syscall(SYS_arch_prctl, kSetCpuid, allowed); }

static void answer(int signal_number, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* instruction = (const uint8_t*)registers[REG_RIP];
  if (instruction[0] != 0x0f || instruction[1] != 0xa2) {  // not CPUID: a real fault
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  const uint32_t leaf = registers[REG_RAX], part = registers[REG_RCX];
  uint32_t a = leaf, b, c = part, d;
  let_cpuid_run(1);
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  let_cpuid_run(0);
  if (leaf == 7 && part == 0 && a < 1) a = 1;  // there is a part 1
  if (leaf == 7 && part == 1) a |= 1u << 5;    // AVX512_BF16
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, 0);
  if (let_cpuid_run(0) != 0) _exit(kNotPossible);
}
