// Loading and launching of CPU kernels: a shared library per direction.
#include <dlfcn.h>
#include <sys/mman.h>

#include "cache.h"
#include "kernel.h"

namespace eqaccel {
namespace {

class CpuKernel : public Kernel {
 public:
  CpuKernel(void (*launch)(const eq_operands*), int64_t (*workspace)(const eq_operands*))
      : launch_(launch), workspace_(workspace) {}
  void launch(const eq_operands& operands, void*) const override { launch_(&operands); }
  std::size_t workspace_bytes(const eq_operands& operands) const override { return workspace_(&operands); }

 private:
  void (*launch_)(const eq_operands*);
  int64_t (*workspace_)(const eq_operands*);
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

// A library is never closed: OpenMP threads may still be inside it when the process ends.
void* open_library(const std::string& code, const std::string& path) {
  const int flags = RTLD_NOW | RTLD_LOCAL | openmp_binding();
  if (!path.empty()) {
    if (void* library = dlopen(path.c_str(), flags)) return library;
  }
  // Not stored, or the cache folder does not allow execution: load from memory. The descriptor stays open because dlopen
  // takes a library of the same name, and so of a descriptor used again, for the one it has already.
  const int file = memfd_create("eqaccel-kernel", MFD_CLOEXEC);
  const std::string memory = "/proc/self/fd/" + std::to_string(file);
  if (file >= 0) cache::write_file(memory, code);
  if (void* library = dlopen(memory.c_str(), flags)) return library;
  throw CompileError("a compiled CPU kernel can not be loaded", dlerror());
}

template <typename Function>
Function find_symbol(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) throw CompileError(std::string("a compiled CPU kernel does not export '") + name + "'", "");
  return reinterpret_cast<Function>(symbol);
}

}  // namespace

std::unique_ptr<Kernel> open_cpu_kernel(const std::string& code, const std::string& path) {
  void* library = open_library(code, path);
  return std::make_unique<CpuKernel>(find_symbol<void (*)(const eq_operands*)>(library, "eq_launch"),
                                     find_symbol<int64_t (*)(const eq_operands*)>(library, "eq_workspace_bytes"));
}

std::unique_ptr<Kernel> load_cpu_kernel(const Program& program, Scalar scalar, Direction direction) {
  const Compiled compiled = program.compile(Backend::cpu, scalar, direction);
  return open_cpu_kernel(compiled.code, compiled.path);
}

}  // namespace eqaccel
