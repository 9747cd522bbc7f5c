// Loading and launching of CPU kernels: a shared library per direction.
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <new>

#include "kernel.h"
#include "scratch.h"
#include "trust.h"

namespace eqaccel {
namespace {

struct OutOfMemory : std::bad_alloc {
  const char* what() const noexcept override { return "out of memory: a kernel for the CPU got none for its scratch"; }
};

template <typename Function>
Function find_symbol(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) throw CompileError(std::string("a compiled CPU kernel does not export '") + name + "'", "");
  return reinterpret_cast<Function>(symbol);
}

class CpuKernel : public Kernel {
 public:
  CpuKernel(void* library, Tables tables)
      : tables_(std::move(tables)), pointers_{tables_.integers.data(), tables_.reals.data()},
        launch_(find_symbol<Launch>(library, "eq_launch")),
        launch_shared_(reinterpret_cast<LaunchShared>(dlsym(library, "eq_launch_shared"))),
        workspace_(find_symbol<Workspace>(library, "eq_workspace_bytes")) {}

  void launch(const eq_operands& operands, void*) const override {
    const eq_operands o = with_tables(operands);
    with_memory([&] { launch_(&o); });
  }
  void launch_shared(const eq_operands& operands, const int32_t* shared, void* stream) const override {
    if (!launch_shared_) return Kernel::launch_shared(operands, shared, stream);
    const eq_operands o = with_tables(operands);
    with_memory([&] { launch_shared_(&o, shared); });
  }
  std::size_t workspace_bytes(const eq_operands& operands) const override {
    const eq_operands o = with_tables(operands);
    return workspace_(&o);
  }

 private:
  using Launch = void (*)(const eq_operands*);
  using LaunchShared = void (*)(const eq_operands*, const int32_t*);
  using Workspace = int64_t (*)(const eq_operands*);

  eq_operands with_tables(eq_operands operands) const {
    if (!tables_.integers.empty()) operands.tables = &pointers_;
    return operands;
  }
  template <class Work>
  static void with_memory(const Work& work) {
    try {
      work();
    } catch (const std::bad_alloc&) {
      throw OutOfMemory();
    }
  }

  Tables tables_;
  eq_tables pointers_;  // to these
  Launch launch_;
  LaunchShared launch_shared_;  // null in families that have none
  Workspace workspace_;
};

// A program may bring an OpenMP of its own, as LAMMPS does, and two pools of threads would fight for the cores. So a
// kernel binds to the libgomp that it was linked with, if that is the one that this library, and torch beside it, use.
int openmp_binding() {
  int flag = 0;
#ifdef RTLD_DEEPBIND
  if (void* linked = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD)) {
    if (dlsym(linked, "GOMP_parallel") == dlsym(RTLD_DEFAULT, "GOMP_parallel")) flag = RTLD_DEEPBIND;
    dlclose(linked);
  }
#endif
  return flag;
}

// A path of a descriptor that was never used before: dlopen takes a library of a path that it knows for the one that it
// has loaded, and numbers of descriptors come again. "//" and "/./" mean the same as "/": these are digits of a count.
std::string fresh_path(int file) {
  static std::atomic<uint64_t> count{0};
  std::string path = "/proc/self/fd/";
  for (uint64_t rest = ++count; rest > 0; rest /= 2) path += rest % 2 ? "./" : "/";
  return path + std::to_string(file);
}

// Loads exactly these bytes, from memory or else from a private file: what lies in the cache may have changed since it was
// read and checked. A library is never closed: OpenMP threads may still be inside it when the process ends.
void* open_library(const std::string& code) {
  const int flags = RTLD_NOW | RTLD_LOCAL | openmp_binding();
  {
    const Descriptor file(memfd_create("eqaccel-kernel", MFD_CLOEXEC));
    if (file && write_all(file, code)) {
      if (void* library = dlopen(fresh_path(file.number()).c_str(), flags)) return library;
    }
  }
  const cache::Scratch scratch;  // memory may not be allowed to be executed
  cache::write_file(scratch.path() + "/kernel.so", code);
  if (void* library = dlopen((scratch.path() + "/kernel.so").c_str(), flags)) return library;
  throw CompileError("a compiled CPU kernel can not be loaded", dlerror());
}

}  // namespace

std::unique_ptr<Kernel> open_cpu_kernel(const std::string& code, Tables tables) {
  return std::make_unique<CpuKernel>(open_library(code), std::move(tables));
}

std::unique_ptr<Kernel> load_cpu_kernel(const Program& program, Scalar scalar, Direction direction) {
  return open_cpu_kernel(program.compile(Backend::cpu, scalar, direction).code, program.tables(direction));
}

}  // namespace eqaccel
