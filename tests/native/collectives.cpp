// Runs the collectives, with ranks as threads that share ordinary memory: under ThreadSanitizer, or
// for another CPU.
//
//   sanitize_collectives [rounds] [seed]
//   portable_collectives [rounds] [seed]
//
// A round is a group of some ranks, a series of random collectives whose results are checked, and
// an end: proper, or one of those that must reach every rank.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "api.h"
#include "api_collectives.h"

namespace {

constexpr int64_t kFloat32 = 11, kBytes = 255, kPatience = 60ll * 1000000000;
enum Operation {
  kBarrier,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter = 7,
  kAllToAll
};

uint64_t seed_of_all, round_number;

void expect(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "%s\nin round %llu of seed %llu\n", what, (unsigned long long)round_number,
          (unsigned long long)seed_of_all);
  exit(1);
}

// What all ranks agree on beforehand: everybody draws the same numbers.
class Plan {
 public:
  explicit Plan(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t limit) { return (int64_t)(engine_() % (uint64_t)limit); }
  // Some floats, some chunks' worth of them, seldom none.
  int64_t floats() {
    const int64_t most[] = {1, 100, 9000, 70000, 200000};
    return below(most[below(5)] + 1);
  }

 private:
  std::mt19937_64 engine_;
};

// What rank r has at place i of its data for collective n; pages of zeros are passed in another
// way.
float value(int64_t n, int64_t r, int64_t i) {
  return i / 1024 % 3 == n % 3 ? 0.f : (float)((n * 7 + r * 3 + i) % 100);
}

struct Rank {
  CclGroup group;
  Plan plan;
  int64_t number = 0;  // of the collective

  Rank(void* base, int64_t rank, int64_t ranks, int64_t spin, uint64_t seed)
      : group{base, nullptr, nullptr, KERNEL(ccl_reduce), rank, ranks, spin, 0, 0, 0, 0, {}},
        plan(seed) {}

  CclStatus call(const CclCollective& collective) {
    CclStatus status;
    cputrain_ccl_collective(&group, &collective, &status, kPatience);
    return status;
  }
  std::vector<float> data(int64_t count, int64_t rank) const {
    std::vector<float> x(count);
    for (int64_t i = 0; i < count; i++) x[i] = value(number, rank, i);
    return x;
  }

  void reduce() {
    const int64_t count = plan.floats(), root = plan.below(2) ? -1 : plan.below(group.ranks);
    std::vector<float> x = data(count, group.rank);
    const int64_t operation = root < 0 ? kAllReduce : kReduce;
    const CclCollective what = {kCclReduceAll, operation, kFloat32, kCclSum, root,    count * 4,
                                nullptr,       x.data(),  nullptr,  nullptr, nullptr, nullptr};
    expect(call(what).kind == kCclDone, "reduce failed");
    if (root >= 0 && root != group.rank) return;
    for (int64_t i = 0; i < count; i++) {
      float total = 0;
      for (int64_t r = 0; r < group.ranks; r++) total += value(number, r, i);
      expect(x[i] == total, "a sum is wrong");
    }
  }

  void reduce_scatter() {
    const int64_t count = plan.floats();
    std::vector<std::vector<float>> parts;
    std::vector<void*> pointers;
    std::vector<float> out(count);
    for (int64_t to = 0; to < group.ranks; to++) {
      parts.push_back(data(count, group.rank * group.ranks + to));
      pointers.push_back(parts.back().data());
    }
    const CclCollective what = {
        kCclReduceScatter, kReduceScatter, kFloat32,        kCclSum, -1,      count * 4,
        nullptr,           out.data(),     pointers.data(), nullptr, nullptr, nullptr};
    expect(call(what).kind == kCclDone, "reduce_scatter failed");
    for (int64_t i = 0; i < count; i++) {
      float total = 0;
      for (int64_t r = 0; r < group.ranks; r++)
        total += value(number, r * group.ranks + group.rank, i);
      expect(out[i] == total, "a scattered sum is wrong");
    }
  }

  // Of one rank (broadcast), of all, or of nobody (a barrier).
  void publish() {
    const int64_t root = plan.below(3) == 0 ? -1 : plan.below(group.ranks);
    std::vector<int64_t> sizes(group.ranks);
    for (int64_t r = 0; r < group.ranks; r++) {
      const int64_t bytes = plan.floats() * 4;
      sizes[r] = root < 0 || root == r ? bytes : 0;
    }
    int64_t most = 0;
    for (int64_t bytes : sizes) most = bytes > most ? bytes : most;
    std::vector<float> mine = data(sizes[group.rank] / 4, group.rank);
    std::vector<std::vector<float>> found(group.ranks);
    std::vector<void*> pointers(group.ranks);
    for (int64_t r = 0; r < group.ranks; r++) {
      found[r].resize(sizes[r] / 4 + 1);
      pointers[r] = sizes[r] ? found[r].data() : nullptr;
    }
    const CclCollective what = {
        kCclPublish, kAllGather,      kBytes,       0,       root,   most, mine.data(),
        nullptr,     pointers.data(), sizes.data(), nullptr, nullptr};
    expect(call(what).kind == kCclDone, "publish failed");
    for (int64_t r = 0; r < group.ranks; r++)
      for (int64_t i = 0; r != group.rank && i < sizes[r] / 4; i++)
        expect(found[r][i] == value(number, r, i), "what was published is wrong");
  }

  void exchange() {
    const int64_t n = group.ranks, me = group.rank;
    std::vector<int64_t> all(n * n), sizes(n), send_sizes(n);
    for (int64_t& bytes : all) bytes = plan.floats() * 4;
    std::vector<std::vector<float>> found(n), sent(n);
    std::vector<void*> pointers(n);
    std::vector<const void*> send_pointers(n);
    for (int64_t r = 0; r < n; r++) {
      sizes[r] = all[r * n + me], send_sizes[r] = all[me * n + r];
      found[r].resize(sizes[r] / 4 + 1), sent[r] = data(send_sizes[r] / 4, me * n + r);
      pointers[r] = found[r].data(), send_pointers[r] = sent[r].data();
    }
    const CclCollective what = {kCclExchange,
                                kAllToAll,
                                kBytes,
                                0,
                                -1,
                                0,
                                nullptr,
                                nullptr,
                                pointers.data(),
                                sizes.data(),
                                send_pointers.data(),
                                send_sizes.data()};
    expect(call(what).kind == kCclDone, "exchange failed");
    for (int64_t r = 0; r < n; r++)
      for (int64_t i = 0; r != me && i < sizes[r] / 4; i++)
        expect(found[r][i] == value(number, r * n + me, i), "what was exchanged is wrong");
  }

  // Everybody to its right neighbour, beside the collectives; more than a pipe holds.
  void pass_on() {
    const int64_t n = group.ranks, me = group.rank, right = (me + 1) % n, left = (me + n - 1) % n;
    const int64_t count = plan.floats();
    std::vector<float> mine = data(count, me), found(count);
    CclStatus sent, received;
    CclGroup sender = group;  // as native_calls.py: another thread of this rank, with its own copy
    std::thread sending(
        [&] { cputrain_ccl_send(&sender, right, mine.data(), count * 4, &sent, kPatience); });
    cputrain_ccl_receive(&group, left, found.data(), count * 4, &received, kPatience);
    sending.join();
    int64_t readable = -1;
    expect(sent.kind == kCclDone && received.kind == kCclDone, "send or receive failed");
    cputrain_ccl_readable(&group, left, &readable);
    expect(readable == 0 || readable == 1, "readable");
    for (int64_t i = 0; i < count; i++)
      expect(found[i] == value(number, left, i), "what was received is wrong");
  }

  void collectives() {
    for (int64_t left = 1 + plan.below(8); left > 0; left--, number++) switch (plan.below(5)) {
        case 0:
          reduce();
          break;
        case 1:
          reduce_scatter();
          break;
        case 2:
          publish();
          break;
        case 3:
          exchange();
          break;
        default:
          if (group.ranks > 1) pass_on();
      }
  }

  CclStatus barrier(int64_t bytes = 0) {
    std::vector<float> x(bytes / 4 + 1);
    const CclCollective what = {kCclReduceAll, kAllReduce, kFloat32, kCclSum, -1,      bytes,
                                nullptr,       x.data(),   nullptr,  nullptr, nullptr, nullptr};
    return call(what);
  }

  void expect_all_present() {
    std::vector<int64_t> absent(group.ranks, -1);
    cputrain_ccl_absent(&group, absent.data());
    for (int64_t one : absent) expect(one == 0, "a rank behind a barrier is absent");
  }

  // The last rank doesn't do what the others expect; each of them must be told, whoever it is.
  void end() {
    const int64_t way = plan.below(5), culprit = group.ranks - 1;
    const bool guilty = group.rank == culprit;
    if (group.ranks == 1 || way == 0) {
      barrier();
      cputrain_ccl_leave(&group);
      return;
    }
    CclStatus status = {};
    if (way == 1) {  // another size
      status = barrier(guilty ? 8 : 4);
      expect(status.kind == kCclMismatch, "a mismatch wasn't found");
    } else if (way == 2) {  // leaves, while others wait
      if (guilty)
        cputrain_ccl_leave(&group);
      else
        status = barrier();
      expect(guilty || status.kind == kCclLeft, "that a rank left wasn't found");
    } else if (way == 3) {  // somebody from outside ends the group
      if (guilty)
        cputrain_ccl_report(&group, kCclDied, group.ranks);
      else
        status = barrier();
      expect(guilty || status.kind == kCclDied, "a report from outside wasn't found");
    } else if (guilty) {  // another thread of the same rank ends its own wait
      std::thread aborting([&] { __atomic_store_n(&group.aborted, 1, __ATOMIC_RELAXED); });
      while (status.kind == kCclDone) status = barrier(4);
      aborting.join();
      expect(status.kind == kCclAborted || status.kind == kCclLeft, "abort");
    } else {
      cputrain_ccl_leave(&group);
    }
  }
};

void run_round(uint64_t seed) {
  Plan plan(seed);
  const int64_t ranks = 1 + plan.below(4), spin = plan.below(2) * 1000;
  int64_t bytes = 0;
  cputrain_ccl_segment_bytes(ranks, &bytes);
  void* base = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset(base, 0, bytes);
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < ranks; r++)
    threads.emplace_back([=] {
      Rank rank(base, r, ranks, spin, seed);
      rank.collectives();
      expect(rank.barrier().kind == kCclDone, "barrier failed");
      rank.expect_all_present();
      rank.end();
    });
  for (std::thread& thread : threads) thread.join();
  free(base);
}

}  // namespace

int main(int count, char** arguments) {
  const uint64_t rounds = count > 1 ? strtoull(arguments[1], nullptr, 10) : 50;
  seed_of_all = count > 2 ? strtoull(arguments[2], nullptr, 10) : 0;
  for (round_number = 0; round_number < rounds; round_number++)
    run_round(seed_of_all * 1000003 + round_number);
  printf("%llu groups of ranks: clean\n", (unsigned long long)rounds);
}
