// What ThreadSanitizer is told of threads that take turns, see lanes.h; without it, nothing.
#pragma once

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);

namespace {

// What is read and written meanwhile is not the kernel's.
struct Unwatched {
  Unwatched() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~Unwatched() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};
// What comes before an arrival comes before what follows a wait for it.
void tell_arrival(void* at) { __tsan_release(at); }
void tell_wait(void* at) { __tsan_acquire(at); }

class Fiber {
 public:
  Fiber() : made_(__tsan_create_fiber(0)) {}
  explicit Fiber(void* known) : made_(known) {}
  static Fiber caller() { return Fiber(__tsan_get_current_fiber()); }
  void end() { __tsan_destroy_fiber(made_); }
  // Before the program goes on there.
  void take_over() { __tsan_switch_to_fiber(made_, __tsan_switch_to_fiber_no_sync); }

 private:
  void* made_;
};

}  // namespace

#else

namespace {

struct Unwatched {
  Unwatched() {}
};
void tell_arrival(void*) {}
void tell_wait(void*) {}
struct Fiber {
  static Fiber caller() { return {}; }
  void end() {}
  void take_over() {}
};

}  // namespace

#endif
