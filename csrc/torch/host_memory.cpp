#include "host_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace eqaccel::ops {
namespace {

constexpr std::size_t page = 2 << 20;  // huge, which Linux gives where it can
constexpr std::size_t most_kept = std::size_t(1) << 30;  // bytes that are free, for later results

// Sizes that differ by less than an eighth share a block, so that a neighbour list may change a little.
std::size_t block_size(std::size_t bytes) {
  const std::size_t step = std::max(page, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

class Pool {
 public:
  void* take(std::size_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto found = free_.find(size); found != free_.end()) {
        void* block = found->second;
        free_.erase(found);
        kept_ -= size;
        return block;
      }
    }
    void* block = std::aligned_alloc(page, size);
    if (!block) throw std::bad_alloc();
#ifdef __linux__
    madvise(block, size, MADV_HUGEPAGE);
#endif
    return block;
  }

  void give(void* block, std::size_t size) {
    if (size > most_kept) return std::free(block);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.emplace(size, block);
    kept_ += size;
    // The smallest go first: they are mapped again soonest.
    while (kept_ > most_kept) {
      const auto least = free_.begin();
      kept_ -= least->first;
      std::free(least->second);
      free_.erase(least);
    }
  }

 private:
  std::mutex mutex_;
  std::multimap<std::size_t, void*> free_;
  std::size_t kept_ = 0;
};

// Leaked on purpose: tensors may be released while static objects are taken down.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

at::Tensor empty_kept(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const std::size_t bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < page) return at::empty(sizes, options);
  const std::size_t size = block_size(bytes);
  void* block = pool().take(size);
  // Resized, it takes torch's own memory.
  return at::for_blob(block, sizes)
      .deleter([size](void* data) { pool().give(data, size); })
      .options(options)
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

}  // namespace eqaccel::ops
