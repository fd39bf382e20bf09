// Intel oneCCL behind a plain C interface: it exports C++ only, and Python can't call that.
//
// This is not a part of libcputrain_native. It is compiled on its first use, with the header that
// oneCCL's own package brings (engines/oneccl_library.py): so cputrain builds where there is no
// oneCCL, and header and library always fit.
//
// Everything here is called by one thread: oneCCL crashes or hangs with more.

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

struct Group {
  std::shared_ptr<ccl::kvs> store;
  std::unique_ptr<ccl::communicator> ranks;
};

std::string last_error;
std::atomic<bool> abandoned{false};
std::set<Group*> groups;
int64_t running = 0;  // collectives that were started and are not done

bool is_under_mpirun() {
  const char* transport = std::getenv("CCL_ATL_TRANSPORT");
  return transport != nullptr && std::strcmp(transport, "mpi") == 0;
}

// oneCCL's own end waits for the other ranks, and for ever if one of them is gone. Under mpirun a
// sound rank waits for them all the same: mpirun kills the ranks that still work (rank 0 saves the
// model, for example) once one has ended that did not leave MPI, and it ends those that wait if a
// rank fails.
void end_soon(int status, void*) {
  auto end = [status] {
    std::fflush(nullptr);
    _exit(status);
  };
  if (abandoned || status != 0 || running != 0) end();
  if (is_under_mpirun()) {
    for (Group* group : groups) delete group;
    groups.clear();
    return;
  }
  std::thread([end] {
    std::this_thread::sleep_for(std::chrono::seconds(10));
    end();
  }).detach();
}

// No exception may cross the C interface: the answer is then `failed`, and cputrain_oneccl_error
// says why.
template <class Answer, class Call>
Answer guarded(Answer failed, Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown error";
  }
  return failed;
}

ccl::event* kept(ccl::event event) {
  ++running;
  return new ccl::event(std::move(event));
}

std::vector<size_t> sizes(const int64_t* values, int64_t count) {
  return std::vector<size_t>(values, values + count);
}

}  // namespace

API const char* cputrain_oneccl_error() { return last_error.c_str(); }

// The first rank makes the meeting place, and writes its 256 bytes of address; the others are given
// them.
API Group* cputrain_oneccl_meet(char* address, int64_t first) {
  return guarded<Group*>(nullptr, [&] {
    ccl::init();
    auto group = std::make_unique<Group>();
    ccl::kvs::address_type place;
    if (first) {
      group->store = ccl::create_main_kvs();
      place = group->store->get_address();
      std::memcpy(address, place.data(), place.size());
    } else {
      std::memcpy(place.data(), address, place.size());
      group->store = ccl::create_kvs(place);
    }
    return group.release();
  });
}

API int64_t cputrain_oneccl_join(Group* group, int64_t size, int64_t rank) {
  return guarded<int64_t>(-1, [&] {
    group->ranks = std::make_unique<ccl::communicator>(
        ccl::create_communicator(static_cast<int>(size), static_cast<int>(rank), group->store));
    groups.insert(group);
    on_exit(end_soon, nullptr);  // handlers run in reverse: before those that oneCCL has registered
    return int64_t{0};
  });
}

API int64_t cputrain_oneccl_leave(Group* group) {
  return guarded<int64_t>(-1, [&] {
    groups.erase(group);
    delete group;
    return int64_t{0};
  });
}

// A group has failed: the process is to end without oneCCL's help.
API void cputrain_oneccl_abandon() {
  abandoned = true;
  on_exit(end_soon, nullptr);
}

API ccl::event* cputrain_oneccl_all_reduce(Group* group, void* data, int64_t count, int64_t dtype,
                                           int64_t reduction) {
  return guarded<ccl::event*>(nullptr, [&] {
    return kept(ccl::allreduce(data, data, count, static_cast<ccl::datatype>(dtype),
                               static_cast<ccl::reduction>(reduction), *group->ranks));
  });
}

API ccl::event* cputrain_oneccl_all_gather(Group* group, const void* source, int64_t size,
                                           void* target, const int64_t* received, int64_t ranks) {
  return guarded<ccl::event*>(nullptr, [&] {
    return kept(ccl::allgatherv(source, size, target, sizes(received, ranks), ccl::datatype::uint8,
                                *group->ranks));
  });
}

API ccl::event* cputrain_oneccl_all_to_all(Group* group, const void* source, const int64_t* sent,
                                           void* target, const int64_t* received, int64_t ranks) {
  return guarded<ccl::event*>(nullptr, [&] {
    return kept(ccl::alltoallv(source, sizes(sent, ranks), target, sizes(received, ranks),
                               ccl::datatype::uint8, *group->ranks));
  });
}

API ccl::event* cputrain_oneccl_broadcast(Group* group, void* data, int64_t size, int64_t root) {
  return guarded<ccl::event*>(nullptr, [&] {
    return kept(
        ccl::broadcast(data, size, ccl::datatype::uint8, static_cast<int>(root), *group->ranks));
  });
}

// 1: done; 0: not within so many nanoseconds; -1: failed. Asking is what moves the data if oneCCL
// has no worker.
API int64_t cputrain_oneccl_done(ccl::event* event, int64_t nanoseconds) {
  return guarded<int64_t>(-1, [&] {
    auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
    while (!event->test()) {
      if (std::chrono::steady_clock::now() >= end) return int64_t{0};
      sched_yield();
    }
    delete event;
    --running;
    return int64_t{1};
  });
}
