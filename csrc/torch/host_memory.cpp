#include "host_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>
#include <vector>

namespace eqaccel::ops {
namespace {

constexpr std::size_t page = 2 << 20;  // huge, which Linux gives where it can
constexpr std::size_t most_kept = std::size_t(1) << 30;  // bytes that are free, for later results
constexpr std::size_t stale_after = 200;  // results: what some steps of a model do without

// Sizes that differ by less than an eighth share a block, so that a neighbour list may change a little.
std::size_t block_size(std::size_t bytes) {
  const std::size_t step = std::max(page, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

// Blocks that results have given back. Of a size the latest is taken first.
class Pool {
 public:
  void* take(std::size_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto latest = std::find_if(free_.rbegin(), free_.rend(), [&](const Block& b) { return b.size == size; });
      if (latest != free_.rend()) {
        void* address = latest->address;
        free_.erase(std::next(latest).base());
        kept_ -= size;
        return address;
      }
    }
    void* address = std::aligned_alloc(page, size);
    if (!address) throw std::bad_alloc();
#ifdef __linux__
    madvise(address, size, MADV_HUGEPAGE);
#endif
    return address;
  }

  void give(void* address, std::size_t size) {
    if (size > most_kept) return std::free(address);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back({address, size, ++given_});
    for (kept_ += size; kept_ > most_kept;) {
      const auto last = least_needed();
      kept_ -= last->size;
      std::free(last->address);
      free_.erase(last);
    }
  }

 private:
  struct Block {
    void* address;
    std::size_t size;
    std::size_t given;  // how many there were then
  };

  // The oldest if it is stale; else the smallest, whose pages are mapped again soonest.
  std::vector<Block>::iterator least_needed() {
    if (given_ - free_.front().given > stale_after) return free_.begin();
    return std::min_element(free_.begin(), free_.end(), [](const Block& a, const Block& b) { return a.size < b.size; });
  }

  std::mutex mutex_;
  std::vector<Block> free_;  // the oldest first
  std::size_t kept_ = 0, given_ = 0;
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
