// Run-time compilers of the GPU backends: NVRTC and hipRTC. They need no GPU.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "program.h"

namespace eqaccel {

struct GpuBinary {
  std::string code;  // cubin, or AMD code object
  std::string log;
};

// Compiles for one architecture ("sm_90", "gfx90a"). No fast-math. Throws CompileError or MissingCompilerError.
GpuBinary compile_gpu(Backend, const std::string& source, const std::string& arch);

// "13.5": part of the cache key. Throws MissingCompilerError.
std::string gpu_compiler_version(Backend);
// Everything besides source and architecture that the result depends on, as part of the cache key.
std::string gpu_compile_options(Backend);

// The files of NVRTC in NVIDIA's packages, the newest first. Looks into these folders, which hold packages of Python.
std::vector<std::string> find_nvrtc(const std::vector<std::string>& folders);
// More such folders, which are looked into before the places that the runtime knows by itself. No effect once NVRTC is
// loaded.
void set_package_folders(const std::vector<std::string>&);

// Kernel name -> {"registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes", "shared_bytes"}, as far as the
// compiler printed them; stack and spills with those of the functions that the kernel calls.
using Resources = std::map<std::string, std::map<std::string, int64_t>>;
Resources read_resources(const std::string& log);

}  // namespace eqaccel
