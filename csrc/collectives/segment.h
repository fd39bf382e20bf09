// The memory that the ranks of one machine share, and how they wait for one another in it.
//
// A group works in rounds. In each, a rank may write into its slot, then posts the round; others
// read. Slots alternate, and no rank writes round r before all have posted round r - 1, that is,
// have read round r - 2, whose slot it was. So one counter per rank is all the synchronisation
// there is, and no rank is more than one round ahead of another.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "api_collectives.h"
#include "kernels/simd.h"

namespace {

// What a collective is; every rank shows it to the others, which compare it with their own.
struct Header {
  uint64_t sequence;
  int64_t operation, dtype, reduction, root, bytes;
  int64_t call, step;  // number of the user's collective if this is a step of one, and which step
};
// Word by word, because a rank that reports a failure may read a header that its rank is writing:
// the report is then of either collective, and no rank reads half a word.
inline void write_header(Header* to, const Header& header) {
  uint64_t words[sizeof(Header) / 8];
  memcpy(words, &header, sizeof header);
  for (size_t i = 0; i < sizeof words / 8; i++)
    __atomic_store_n(reinterpret_cast<uint64_t*>(to) + i, words[i], __ATOMIC_RELAXED);
}
inline Header read_header(const Header* from) {
  uint64_t words[sizeof(Header) / 8];
  for (size_t i = 0; i < sizeof words / 8; i++)
    words[i] = __atomic_load_n(reinterpret_cast<const uint64_t*>(from) + i, __ATOMIC_RELAXED);
  Header header;
  memcpy(&header, words, sizeof header);
  return header;
}
constexpr int kHeaders = 4;  // a rank is at most one round, hence one collective, ahead

// A counter that one rank moves and others wait for. The futex word and the number of sleepers
// share a cache line, because the rank that moves the one looks at the other.
struct alignas(128) Counter {
  uint32_t value;
  uint32_t sleepers;
};
struct alignas(128) Control {
  Counter posted;
  uint32_t left;  // the rank has ended the group properly, and its process may end too
  Header headers[kHeaders];
};
struct alignas(128) Pipe {  // bytes from one rank to another, a ring
  Counter written, read;
};
struct alignas(128) Preamble {
  uint64_t magic;
  uint32_t failed;  // 1 while a rank writes the lines below, 2 when they are there
  int32_t kind, culprit, reporter;
};

constexpr uint64_t kMagic = 0x6c63632d75706331;
// Two slots of 256 KB and as many of the neighbour's fit a 1 MB L2 cache beside the data itself:
// larger chunks fall out of it, smaller ones wait more often.
constexpr int64_t kChunk = 256 * 1024;
constexpr int64_t kSlot = 2 * kChunk;  // a chunk, and a part of the chunk before it, reduced
constexpr int64_t kRing = 128 * 1024;  // bytes of a pipe; a power of two

constexpr int64_t kPage = 4096;
inline int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct Layout {
  int64_t ranks;
  int64_t controls() const { return kPage; }
  int64_t slots() const { return controls() + pages(ranks * (int64_t)sizeof(Control)); }
  int64_t pipes() const { return slots() + ranks * 2 * kSlot; }
  int64_t rings() const { return pipes() + pages(ranks * ranks * (int64_t)sizeof(Pipe)); }
  int64_t end() const { return rings() + ranks * ranks * kRing; }
};

inline uint32_t load_acquire(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
// Whether `value` has come as far as `wanted`; both may have wrapped around.
inline bool reached(uint32_t value, uint32_t wanted) { return (int32_t)(value - wanted) >= 0; }

inline void move(Counter* counter, uint32_t value) {
  __atomic_store_n(&counter->value, value, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&counter->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &counter->value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// One rank's view of a group's shared memory during one call.
class Member {
 public:
  Member(CclGroup* group, CclStatus* status, int64_t timeout_ns)
      : group_(group), status_(status), layout_{group->ranks}, timeout_ns_(timeout_ns) {
    *status = {kCclDone, -1, group->rank, 0, 0, 0, 0, 0, 0};
  }

  int64_t rank() const { return group_->rank; }
  int64_t ranks() const { return group_->ranks; }
  CclReduce reduction() const { return group_->reduce; }
  char* base() const { return static_cast<char*>(group_->base); }
  Preamble* preamble() const { return reinterpret_cast<Preamble*>(base()); }
  Control* control(int64_t rank) const {
    return reinterpret_cast<Control*>(base() + layout_.controls()) + rank;
  }
  Pipe* pipe(int64_t from, int64_t to) const {
    return reinterpret_cast<Pipe*>(base() + layout_.pipes()) + from * ranks() + to;
  }
  char* ring(int64_t from, int64_t to) const {
    return base() + layout_.rings() + (from * ranks() + to) * kRing;
  }
  // The slot that `rank` writes in the round that is open.
  char* slot(int64_t rank) const {
    return base() + layout_.slots() + (rank * 2 + (group_->round & 1)) * kSlot;
  }

  // --- Rounds ----------------------------------------------------------------------------------

  // Starts a collective: the header is shown with its first round.
  void begin(int64_t operation, int64_t dtype, int64_t reduction, int64_t root, int64_t bytes) {
    group_->sequence++;
    first_round_ = group_->round;
    mine_ = {group_->sequence, operation, dtype, reduction, root, bytes, 0, 0};
    const CclCall& call = group_->call;
    if (!call.sequence) return;
    int64_t step = bytes;  // compared only: steps that differ have different numbers
    for (int64_t word : {operation, dtype, reduction, root}) step = step * 257 + word;
    mine_ = {group_->sequence, call.operation, call.dtype,    call.reduction,
             call.root,        call.bytes,     call.sequence, step};
  }
  // Waits until this rank's slot may be written.
  bool open_round() {
    if (failed_elsewhere()) return false;
    for (int64_t peer = 0; peer < ranks(); peer++)
      if (peer != rank() && !await_posted(peer, group_->round)) return false;
    if (group_->round == first_round_) {
      if (!check_previous()) return false;
      write_header(&control(rank())->headers[mine_.sequence % kHeaders], mine_);
    }
    return true;
  }
  void post() { move(&control(rank())->posted, group_->round + 1); }
  // Waits until `peer` has posted the open round, whose slot may then be read.
  bool await(int64_t peer) { return await_posted(peer, group_->round + 1); }
  bool await_all() {
    for (int64_t peer = 0; peer < ranks(); peer++)
      if (peer != rank() && !await(peer)) return false;
    return true;
  }
  void close_round() { group_->round++; }

  // --- Waiting ---------------------------------------------------------------------------------

  // Waits until the peer's counter satisfies `ready`; false if it never will. A short spin first:
  // a sleeper takes tens of microseconds to wake, as long as a whole chunk.
  template <class Ready>
  bool wait(Counter* counter, int64_t peer, Ready ready) {
    if (spin(counter, ready)) return true;
    const int64_t deadline = timeout_ns_ > 0 ? now_ns() + timeout_ns_ : INT64_MAX;
    int64_t slices = 0;
    while (true) {
      __atomic_fetch_add(&counter->sleepers, 1, __ATOMIC_SEQ_CST);
      const uint32_t seen = __atomic_load_n(&counter->value, __ATOMIC_SEQ_CST);
      // Now and then awake, to look whether the peer still lives and no rank gave up.
      const timespec slice = {0, 50000000};
      long result = 0;
      int error = 0;
      const bool done = ready(seen);
      if (!done) {
        result = syscall(SYS_futex, &counter->value, FUTEX_WAIT, seen, &slice, nullptr, 0);
        error = errno;
      }
      __atomic_fetch_sub(&counter->sleepers, 1, __ATOMIC_SEQ_CST);
      if (done || ready(load_acquire(&counter->value))) return true;
      // A signal that came between two sleeps has interrupted none: asked twice a second, too.
      const bool asks = (result == -1 && error == EINTR) || ++slices % 10 == 0;
      if (asks && group_->on_signal && group_->on_signal()) return fail(kCclInterrupted, -1);
      // A peer may have posted, and ended, after the counter was looked at: look once more.
      const bool sound = is_sound(peer);
      if (ready(load_acquire(&counter->value))) return true;
      if (!sound) return false;
      if (now_ns() > deadline) return fail(kCclTimeout, peer);
    }
  }

  bool failed_elsewhere() {
    // Another thread of this process sets it.
    if (__atomic_load_n(&group_->aborted, __ATOMIC_RELAXED)) return !fail(kCclAborted, -1);
    if (load_acquire(&preamble()->failed) != 2) return false;
    const int64_t kind = preamble()->kind, culprit = preamble()->culprit;
    fail(kind, kind == kCclMismatch ? odd_one(culprit, preamble()->reporter) : culprit);
    status_->reporter = preamble()->reporter;
    return true;
  }

  // Ends the call with this reason; the first reason of all is the one that every rank gets.
  bool fail(int64_t kind, int64_t culprit) {
    status_->kind = kind;
    status_->culprit = culprit;
    if (culprit >= 0 && culprit < ranks()) {  // else a rank of another machine
      const Header header = last_header(culprit);
      status_->sequence = header.call ? header.call : header.sequence;
      status_->operation = header.operation;
      status_->dtype = header.dtype;
      status_->root = header.root;
      status_->bytes = header.bytes;
      status_->reduction = header.reduction;
    }
    uint32_t none = 0;
    Preamble* shared = preamble();
    if (kind != kCclAborted && __atomic_compare_exchange_n(&shared->failed, &none, 1, false,
                                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      shared->kind = (int32_t)kind;
      shared->culprit = (int32_t)culprit;
      shared->reporter = (int32_t)rank();
      __atomic_store_n(&shared->failed, 2, __ATOMIC_RELEASE);
    }
    return false;
  }

  Header last_header(int64_t peer) const {
    Header last = read_header(control(peer)->headers);
    for (int i = 1; i < kHeaders; i++) {
      const Header header = read_header(control(peer)->headers + i);
      if (header.sequence > last.sequence) last = header;
    }
    return last;
  }

  // Whether a process has ended, as its pidfd tells; a holder of its sockets doesn't count.
  bool is_dead(int64_t peer) const {
    if (peer == rank() || !group_->pidfds || group_->pidfds[peer] < 0) return false;
    pollfd ask = {group_->pidfds[peer], POLLIN, 0};
    return poll(&ask, 1, 0) == 1;
  }

 private:
  // Of two ranks that differ, the one that isn't in this rank's collective.
  int64_t odd_one(int64_t culprit, int64_t reporter) const {
    if (culprit < 0 || culprit >= ranks() || reporter == rank()) return culprit;
    const Header theirs = read_header(&control(culprit)->headers[mine_.sequence % kHeaders]);
    return culprit == rank() || memcmp(&theirs, &mine_, sizeof mine_) == 0 ? reporter : culprit;
  }

  // Whether waiting still makes sense. A process that ended without having left the group died,
  // even if it isn't the one that is waited for: no rank can finish without it.
  bool is_sound(int64_t awaited) {
    if (failed_elsewhere()) return false;
    for (int64_t peer = 0; peer < ranks(); peer++)
      if (is_dead(peer) && !load_acquire(&control(peer)->left)) return fail(kCclDied, peer);
    if (load_acquire(&control(awaited)->left)) return fail(kCclLeft, awaited);
    return true;
  }

  // Whether the counter satisfies `ready` after a short spin. Spins that were in vain lately show
  // that the peer doesn't run, perhaps because it waits for this very core, to which the spin
  // clings: after three of them in a row only every 2^n-th wait spins, with n up to 6.
  template <class Ready>
  bool spin(Counter* counter, Ready ready) {
    if (!group_->spin) return false;
    // Messages and collectives run side by side: an update that is lost does no harm.
    const uint32_t state = __atomic_load_n(&group_->spins, __ATOMIC_RELAXED);
    const uint32_t vain = state & 15, left_out = state >> 4;
    auto remember = [&](uint32_t next) {
      __atomic_store_n(&group_->spins, next, __ATOMIC_RELAXED);
    };
    if (left_out) {
      remember(state - 16);
      return false;
    }
    for (int64_t i = 0; i < group_->spin; i++) {
      if (ready(load_acquire(&counter->value))) {
        if (vain) remember(vain / 2);
        return true;
      }
      pause_spinning();
    }
    const uint32_t more = vain < 6 ? vain + 1 : vain;
    remember(more < 3 ? more : more | 16u << more);
    return false;
  }

  bool await_posted(int64_t peer, uint32_t wanted) {
    Counter* posted = &control(peer)->posted;
    if (!reached(load_acquire(&posted->value), wanted) &&
        !wait(posted, peer, [=](uint32_t value) { return reached(value, wanted); }))
      return false;
    // The peer has shown its header if it has posted the first round of this collective.
    if (wanted == first_round_ + 1) return same(control(peer)->headers, mine_, peer);
    return true;
  }

  bool same(const Header* headers, const Header& mine, int64_t peer) {
    const Header theirs = read_header(&headers[mine.sequence % kHeaders]);
    if (memcmp(&theirs, &mine, sizeof mine) == 0) return true;
    return fail(kCclMismatch, peer);
  }

  // A rank that waited for no other in the collective before this one compares now.
  bool check_previous() {
    if (mine_.sequence < 2) return true;
    const Header previous = control(rank())->headers[(mine_.sequence - 1) % kHeaders];
    for (int64_t peer = 0; peer < ranks(); peer++)
      if (peer != rank() && !same(control(peer)->headers, previous, peer)) return false;
    return true;
  }

  CclGroup* group_;
  CclStatus* status_;
  Layout layout_;
  int64_t timeout_ns_;
  uint32_t first_round_ = 0;
  Header mine_ = {};
};

}  // namespace
