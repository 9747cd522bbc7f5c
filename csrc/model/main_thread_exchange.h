// Runs work on a thread of its own, while the thread that asked for it serves the exchanges that the work calls for.
//
// On a GPU, torch differentiates on a thread of its own, and MPI may only be called from the thread that started it
// (MPI_THREAD_FUNNELED at most, in programs that never asked for more).
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "eqaccel/exchange.h"

namespace eqaccel {

class MainThreadExchange final : public GhostExchange {
 public:
  MainThreadExchange() : worker_([this] { loop(); }) {}

  ~MainThreadExchange() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  // Returns when `work` has ended, and throws what it threw. Calls that it makes of this exchange reach `target`.
  void run(GhostExchange* target, std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    target_ = target;
    work_ = std::move(work);
    changed_.notify_all();
    for (;;) {
      changed_.wait(lock, [this] { return request_ || !work_; });
      if (!work_) break;
      std::exception_ptr failure;
      try {
        request_();
      } catch (...) {
        failure = std::current_exception();
      }
      answer_ = failure;
      request_ = nullptr;
      changed_.notify_all();
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  void nodes(GhostNodes& nodes) const override { target_->nodes(nodes); }
  void forward(const void* rows, void* ghost_rows, int64_t width, bool is_double) override {
    ask([&] { target_->forward(rows, ghost_rows, width, is_double); });
  }
  void reverse(const void* ghost_rows, void* rows, int64_t width, bool is_double) override {
    ask([&] { target_->reverse(ghost_rows, rows, width, is_double); });
  }

 private:
  // Called on the worker, or on a thread that the worker waits for.
  void ask(std::function<void()> request) {
    std::unique_lock<std::mutex> lock(mutex_);
    request_ = std::move(request);
    changed_.notify_all();
    changed_.wait(lock, [this] { return !request_; });
    if (answer_) std::rethrow_exception(std::exchange(answer_, nullptr));
  }

  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return work_ || ending_; });
      if (ending_) return;
      lock.unlock();
      std::exception_ptr failure;
      try {
        work_();
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      failure_ = failure;
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  GhostExchange* target_ = nullptr;
  std::function<void()> work_, request_;  // set while one is under way
  std::exception_ptr failure_, answer_;   // of the work, and of the last request
  bool ending_ = false;
  std::thread worker_;  // last, because it uses all of the above
};

}  // namespace eqaccel
