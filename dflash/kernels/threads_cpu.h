// Work that is divided among the threads of a pool.

#ifndef DFLASH_KERNELS_THREADS_CPU_H_
#define DFLASH_KERNELS_THREADS_CPU_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace dflash {

// Runs work(0) ... work(parts - 1) on the calling thread and on the threads of the pool that are
// free. The caller waits only for parts that have begun, so a busy pool cannot block it.
template <typename Work>
void Spread(xla::ffi::ThreadPool& pool, int64_t parts, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto state = std::make_shared<State>();
  const auto take = [state, parts, &work] {
    for (int64_t part; (part = state->next.fetch_add(1)) < parts;) {
      work(part);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), parts) - 1;
  for (int64_t helper = 0; helper < helpers; ++helper) pool.Schedule(std::function<void()>(take));
  take();
  while (state->done.load(std::memory_order_acquire) < parts) std::this_thread::yield();
}

}  // namespace dflash

#endif  // DFLASH_KERNELS_THREADS_CPU_H_
