// The C interface of the collectives of one machine's ranks, over memory that they share
// (collectives/segment.h). They are compiled once, without an instruction set in their names: what
// they compute is the reduction's, a kernel of api.h that the caller gives them.
//
// distributed/native_calls.py mirrors the structures and the numbers.
#pragma once

#include <cstdint>

#include "visibility.h"

enum CclKind {
  kCclDone,
  kCclDied,      // the culprit's process has ended
  kCclTimeout,   // the culprit is late
  kCclMismatch,  // the culprit is in another collective, or one of another size
  kCclLeft,      // the culprit has ended the group
  kCclInterrupted,
  kCclAborted,  // by this rank itself
};
enum CclDtype {
  kCclBool,
  kCclUint8,
  kCclInt8,
  kCclInt16,
  kCclInt32,
  kCclInt64,
  kCclUint16,
  kCclUint32,
  kCclUint64,
  kCclFloat16,
  kCclBfloat16,
  kCclFloat32,
  kCclFloat64,
  kCclComplex64,
  kCclComplex128,
};
enum CclReduction {
  kCclSum,
  kCclMean,
  kCclProduct,
  kCclMin,
  kCclMax,
  kCclAnd,
  kCclOr,
  kCclXor,
  kCclPartOfMean,  // a sum that is divided elsewhere, and not to be mistaken for one that isn't
};
enum CclWay { kCclReduceAll, kCclReduceScatter, kCclPublish, kCclExchange };

// How many ranks a group has at most: kernels keep an address for each on the stack.
constexpr int64_t kCclMostRanks = 1024;

// The kernel ccl_reduce of one instruction set.
typedef void (*CclReduce)(int64_t dtype, int64_t reduction, void* out, const void* const* sources,
                          int64_t ranks, int64_t count, int64_t divisor, int64_t* known);

// How a call ended. If not well: who was the cause, which rank found it, and the last collective
// that the culprit entered.
struct CclStatus {
  int64_t kind, culprit, reporter;
  int64_t sequence, operation, dtype, root, bytes, reduction;
};
// A user's collective, of which calls may be steps; sequence 0: they are none.
struct CclCall {
  int64_t sequence, operation, dtype, reduction, root, bytes;
};
// One rank's side of a group; the caller owns it, calls change round, sequence and spins.
struct CclGroup {
  void* base;              // of the shared memory
  const int32_t* pidfds;   // of every rank's process, or null
  int64_t (*on_signal)();  // or null; not 0 ends the call that waits
  CclReduce reduce;
  int64_t rank, ranks;
  int64_t spin;     // how often a wait looks before it sleeps
  int64_t aborted;  // not 0 ends all that waits
  uint64_t sequence;
  uint32_t round;
  uint32_t spins;  // how often in a row looking was in vain, and how many waits are to go without
                   // (segment.h)
  CclCall call;    // shown to the others in place of its steps
};
// operation, dtype, reduction, root and bytes must be the same on every rank. The pointers depend
// on the way: output = reduction of everybody's output of `bytes` (only at root, unless -1); output
// = reduction of everybody's parts[rank]; parts[r] = input of rank r, sizes[r] long and at most
// `bytes` (or null: not wanted); parts[r] = send_parts[rank] of rank r. A rank's own part is never
// copied where no reduction is.
struct CclCollective {
  int64_t way, operation, dtype, reduction, root, bytes;
  const void* input;
  void* output;
  void* const* parts;
  const int64_t* sizes;
  const void* const* send_parts;
  const int64_t* send_sizes;
};
CPUTRAIN_EXPORT void cputrain_ccl_segment_bytes(int64_t ranks, int64_t* bytes);
CPUTRAIN_EXPORT void cputrain_ccl_collective(CclGroup* group, const CclCollective* collective,
                                             CclStatus* status, int64_t timeout_ns);
// Tells the others that this rank ends the group, so that its end is no death.
CPUTRAIN_EXPORT void cputrain_ccl_leave(CclGroup* group);
// absent[r]: whether rank r is behind this one, which has timed out.
CPUTRAIN_EXPORT void cputrain_ccl_absent(CclGroup* group, int64_t* absent);
// Ends the group for all ranks of this machine, for a reason from outside it: culprits from `ranks`
// on are ranks of other machines, as the caller counts them.
CPUTRAIN_EXPORT void cputrain_ccl_report(CclGroup* group, int64_t kind, int64_t culprit);
// A stream of bytes from each rank to each other, apart from the collectives. One thread at a time
// may write to a peer, and one read from it.
CPUTRAIN_EXPORT void cputrain_ccl_send(CclGroup* group, int64_t peer, const void* data,
                                       int64_t bytes, CclStatus* status, int64_t timeout_ns);
CPUTRAIN_EXPORT void cputrain_ccl_receive(CclGroup* group, int64_t peer, void* data, int64_t bytes,
                                          CclStatus* status, int64_t timeout_ns);
CPUTRAIN_EXPORT void cputrain_ccl_readable(CclGroup* group, int64_t peer, int64_t* readable);
