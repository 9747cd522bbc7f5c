// The families of kernels: how a program of each is loaded, and where it runs. A payload names its family in entry "meta".
#pragma once
#include <optional>
#include <string>

#include "kernel.h"

namespace eqaccel {

struct Family {
  const char* name;  // that of a folder of eqaccel/families
  // A kernel for a GPU that is launched with eq_operands; null where a family has a way of its own.
  std::unique_ptr<Kernel> (*load_gpu_kernel)(const Program&, Backend, Scalar, Direction, int device);
  // Compiles and loads a kernel, which is then kept.
  void (*load)(const Program&, Backend, Scalar, Direction, int device);
  // What to compile a kernel for so that a device of `arch` runs it; nothing if there is no kernel for such devices. On
  // the CPU `arch` is empty.
  std::optional<std::string> (*compile_arch)(const Program&, Backend, Scalar, Direction, const std::string& arch);
};

// Throws std::invalid_argument if no family has the name.
const Family& find_family(const std::string& name);

}  // namespace eqaccel
