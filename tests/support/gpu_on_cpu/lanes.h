// The threads of a block of a GPU, on one thread of a CPU: each goes on until it waits, and then the next one does.
//
// They take turns upwards in one block and downwards in the next, so that what is read before another thread has written
// it is not there in one of them. With -fsanitize=thread, to which nothing but barriers puts them in order, they also tell
// of what is read or written without one.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "sanitizer.h"

struct Index {
  unsigned x = 0, y = 0;
};

namespace {

// 16 bytes on their way to shared memory.
struct Copy {
  float* to;
  float four[4];
};

// Where a program goes on.
struct Place {
  ucontext_t context;
  Fiber fiber;

  void go_on() {
    known_fiber().take_over();
    setcontext(&context);
  }
  void wait_for(Place& next) {
    next.known_fiber().take_over();
    swapcontext(&context, &next.context);
  }

 private:
  Fiber known_fiber() const {
    const Unwatched scope;
    return fiber;
  }
};

struct GpuThread : Place {
  static constexpr std::size_t stack_bytes = 1 << 18;

  Index number;
  int turn = 0;  // of the two places where lanes of a warp show each other something
  std::vector<Copy> begun;
  std::vector<std::vector<Copy>> committed;
  std::unique_ptr<std::byte[]> stack = std::make_unique_for_overwrite<std::byte[]>(stack_bytes);
  bool has_ended = false;

  GpuThread(Index number_, void (*run)()) : number(number_) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack.get();
    context.uc_stack.ss_size = stack_bytes;
    makecontext(&context, run, 0);
  }
  ~GpuThread() { fiber.end(); }
};

class GpuBlock {
 public:
  GpuThread& current() { return *threads_[current_]; }

  // Runs a kernel, each thread from its beginning to its end.
  void run(unsigned number, unsigned threads, unsigned rows, const std::function<void()>& kernel) {
    {
      const Unwatched scope;
      for (unsigned n = 0; n < threads * rows; ++n)
        threads_.push_back(std::make_unique<GpuThread>(Index{n % threads, n / threads}, run_thread));
      kernel_ = &kernel;
      goes_down_ = number % 2 == 1;
      current_ = goes_down_ ? threads * rows - 1 : 0;
      caller_.fiber = Fiber::caller();
    }
    tell_arrival(this);
    caller_.wait_for(current());
    tell_wait(this);
    threads_.clear();
  }
  // Others go on before the one that calls this does.
  void yield() {
    const Unwatched scope;
    GpuThread& before = current();
    take_next();
    if (&current() != &before) before.wait_for(current());
  }

 private:
  std::vector<std::unique_ptr<GpuThread>> threads_;
  unsigned current_ = 0;
  bool goes_down_ = false;
  const std::function<void()>* kernel_ = nullptr;
  Place caller_;

  static void run_thread();
  void take_next() {
    const unsigned count = unsigned(threads_.size());
    do current_ = (current_ + (goes_down_ ? count - 1 : 1)) % count;
    while (current().has_ended);
  }
  // Where the program goes on when the current thread has ended.
  Place& end_current() {
    const Unwatched scope;
    current().has_ended = true;
    if (std::ranges::all_of(threads_, [](const auto& thread) { return thread->has_ended; })) return caller_;
    take_next();
    return current();
  }
};
GpuBlock gpu_block;

void GpuBlock::run_thread() {
  tell_wait(&gpu_block);
  (*gpu_block.kernel_)();
  tell_arrival(&gpu_block);
  gpu_block.end_current().go_on();
}

// Where threads wait for each other.
class GpuBarrier {
 public:
  explicit GpuBarrier(unsigned threads) : threads_(threads) {}

  void arrive_and_wait() {
    tell_arrival(this);
    wait();
    tell_wait(this);
  }

 private:
  unsigned threads_, arrived_ = 0, phase_ = 0;

  void wait() {
    const Unwatched scope;
    const unsigned phase = phase_;
    if (++arrived_ == threads_) arrived_ = 0, ++phase_;
    while (phase == phase_) gpu_block.yield();
  }
};

}  // namespace

#define threadIdx (gpu_block.current().number)
