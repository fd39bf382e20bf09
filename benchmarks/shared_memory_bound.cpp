// The least time in which two processes can sum a tensor over memory that they share: what
// benchmarks/collectives.py compares with. No headers, no checks, no sleeping; one process on each
// core.
//
//   shared_memory_bound MEGABYTES ROUNDS CHUNK_KB        prints the milliseconds of every round
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct Shared {
  alignas(128) volatile unsigned posted[2][32];
};

static void post(Shared* shared, int rank, unsigned value) {
  __atomic_store_n(&shared->posted[rank][0], value, __ATOMIC_RELEASE);
}
static void await(Shared* shared, int rank, unsigned value) {
  while ((int)(__atomic_load_n(&shared->posted[rank][0], __ATOMIC_ACQUIRE) - value) < 0)
    __builtin_ia32_pause();
}

int main(int, char** arguments) {
  const long count = atol(arguments[1]) * (1 << 18), rounds = atol(arguments[2]);
  const long chunk = atol(arguments[3]) * 256;
  char* memory = (char*)mmap(nullptr, sizeof(Shared) + 4 * chunk * 4, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Shared* shared = (Shared*)memory;
  float* slots = (float*)(memory + sizeof(Shared));
  const int rank = fork() ? 0 : 1;
  cpu_set_t mine;
  CPU_ZERO(&mine);
  CPU_SET(rank, &mine);
  sched_setaffinity(0, sizeof mine, &mine);
  float* data = (float*)aligned_alloc(4096, count * 4);
  memset(data, 0, count * 4);
  unsigned step = 0;
  for (long round = 0; round < rounds; round++) {
    post(shared, rank, ++step);
    await(shared, 1 - rank, step);
    const auto start = std::chrono::steady_clock::now();
    for (long begin = 0; begin < count; begin += chunk) {
      const long size = count - begin < chunk ? count - begin : chunk;
      float* own = slots + (rank * 2 + (step & 1)) * chunk;
      const float* other = slots + ((1 - rank) * 2 + (step & 1)) * chunk;
      memcpy(own, data + begin, size * 4);
      post(shared, rank, ++step);
      await(shared, 1 - rank, step);
      float* out = data + begin;
#pragma GCC ivdep
      for (long i = 0; i < size; i++) out[i] += other[i];
    }
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    if (rank == 0) printf("%.4f\n", taken.count());
  }
  if (rank == 0) wait(nullptr);
}
