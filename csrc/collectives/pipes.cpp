// Bytes from one rank to another, beside the rounds: send and recv.
#include "segment.h"

namespace {

// Copies between memory and a ring of kRing bytes, from position `at` on.
template <class Copy>
void in_ring(uint32_t at, int64_t size, Copy copy) {
  const int64_t start = at & (kRing - 1);
  const int64_t first = kRing - start < size ? kRing - start : size;
  copy(start, 0, first);
  if (size > first) copy(0, first, size - first);
}

}  // namespace

void cputrain_ccl_send(CclGroup* group, int64_t peer, const void* data, int64_t bytes,
                       CclStatus* status, int64_t timeout_ns) {
  Member m(group, status, timeout_ns);
  if (m.failed_elsewhere()) return;
  Pipe* pipe = m.pipe(m.rank(), peer);
  char* ring = m.ring(m.rank(), peer);
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const uint32_t written = pipe->written.value;
    auto has_room = [=](uint32_t read) { return written - read < (uint32_t)kRing; };
    if (!m.wait(&pipe->read, peer, has_room)) return;
    const int64_t room = kRing - (int64_t)(written - load_acquire(&pipe->read.value));
    const int64_t size = room < bytes ? room : bytes;
    in_ring(written, size, [=](int64_t at, int64_t done, int64_t length) {
      memcpy(ring + at, from + done, length);
    });
    move(&pipe->written, written + (uint32_t)size);
    from += size;
    bytes -= size;
  }
}

void cputrain_ccl_receive(CclGroup* group, int64_t peer, void* data, int64_t bytes,
                          CclStatus* status, int64_t timeout_ns) {
  Member m(group, status, timeout_ns);
  if (m.failed_elsewhere()) return;
  Pipe* pipe = m.pipe(peer, m.rank());
  const char* ring = m.ring(peer, m.rank());
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const uint32_t read = pipe->read.value;
    auto has_data = [=](uint32_t written) { return written != read; };
    if (!m.wait(&pipe->written, peer, has_data)) return;
    const int64_t there = (int64_t)(load_acquire(&pipe->written.value) - read);
    const int64_t size = there < bytes ? there : bytes;
    in_ring(read, size, [=](int64_t at, int64_t done, int64_t length) {
      memcpy(to + done, ring + at, length);
    });
    move(&pipe->read, read + (uint32_t)size);
    to += size;
    bytes -= size;
  }
}

void cputrain_ccl_readable(CclGroup* group, int64_t peer, int64_t* readable) {
  CclStatus status;
  Member m(group, &status, 0);
  Pipe* pipe = m.pipe(peer, m.rank());
  *readable = load_acquire(&pipe->written.value) != load_acquire(&pipe->read.value);
}
