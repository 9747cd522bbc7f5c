#include "gpu_compiler.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <utility>

#include "diagnostics.h"
#include "dynamic_library.h"
#include "settings.h"

namespace eqaccel {
namespace {

// NVRTC and hipRTC have the same functions under other names.
struct Table {
  int (*create)(void** program, const char* source, const char* name, int, const char* const*, const char* const*);
  int (*compile)(void* program, int count, const char* const* options);
  int (*log_size)(void* program, std::size_t*);
  int (*log)(void* program, char*);
  int (*code_size)(void* program, std::size_t*);
  int (*code)(void* program, char*);
  int (*destroy)(void** program);
  int (*version)(int* major, int* minor);
  const char* (*error)(int);
};

std::mutex folders_mutex;
std::vector<std::string> package_folders;

std::vector<std::string> glob_paths(const std::string& pattern) {
  glob_t found;
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  std::reverse(paths.begin(), paths.end());  // the newest version first
  return paths;
}

// A path as part of a pattern in which it means itself.
std::string literal(const std::string& path) {
  std::string pattern;
  for (const char c : path) pattern += std::string(std::string("*?[\\").find(c) == std::string::npos ? "" : "\\") + c;
  return pattern;
}

// Where an open library lies, "" if that is not known.
std::filesystem::path folder_of(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || !map->l_name) return {};
  return std::filesystem::path(map->l_name).parent_path();
}

// Where NVIDIA's wheels may lie, also for a C++ program: beside eqaccel, and beside torch, which an environment on top of
// another one has elsewhere.
std::vector<std::string> site_packages() {
  std::vector<std::string> folders;
  Dl_info self;
  const bool known = dladdr(reinterpret_cast<void*>(&site_packages), &self) && self.dli_fname;
  folders.push_back(known ? std::filesystem::path(self.dli_fname).parent_path() / ".." : ".");
  if (void* torch = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD)) {
    const std::filesystem::path folder = folder_of(torch);
    if (!folder.empty()) folders.push_back(folder / "../..");
    dlclose(torch);
  }
  return folders;
}

std::vector<std::string> nvrtc_names() {
  std::vector<std::string> names;
  {
    std::lock_guard<std::mutex> lock(folders_mutex);
    names = find_nvrtc(package_folders);
  }
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) names.push_back(name);
  for (const std::string& path : find_nvrtc(site_packages())) names.push_back(path);
  names.push_back("libnvrtc.so");
  for (const std::string& path : glob_paths("/usr/local/cuda/lib64/libnvrtc.so.*")) names.push_back(path);
  return names;
}

Table read_table(void* library, bool cuda) {
  Table table;
  const std::string prefix = cuda ? "nvrtc" : "hiprtc";
  const auto find = [&](const char* name, auto& function) {
    find_function(library, (prefix + name).c_str(), function);
  };
  find("CreateProgram", table.create);
  find("CompileProgram", table.compile);
  find("GetProgramLogSize", table.log_size);
  find("GetProgramLog", table.log);
  find(cuda ? "GetCUBINSize" : "GetCodeSize", table.code_size);
  find(cuda ? "GetCUBIN" : "GetCode", table.code);
  find("DestroyProgram", table.destroy);
  find("Version", table.version);
  find("GetErrorString", table.error);
  return table;
}

// NVRTC opens a second library by its name alone, which lies beside it. Wheels of some versions do not say where that is
// (13.0, which comes with torch for CUDA 13), but a library that is open already is found. If it lies elsewhere, NVRTC finds
// it or says so.
void open_builtins(void* nvrtc, const Table& table) {
  int major = 0, minor = 0;
  if (table.version(&major, &minor) != 0) return;
  const std::string name = "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
  dlopen((folder_of(nvrtc) / name).c_str(), RTLD_NOW | RTLD_LOCAL);
}

Table load_table(Backend backend) {
  if (backend == Backend::cpu) throw std::invalid_argument("backend: expected cuda or hip, got cpu");
  const bool cuda = backend == Backend::cuda;
  void* library = nullptr;
  if (cuda) {
    // An order, so before what is loaded already: if it can not be followed, silently using another would mislead.
    const std::string ordered = settings::nvrtc();
    library = ordered.empty() ? open_first(nvrtc_names()) : open_first({ordered});
    if (!library && !ordered.empty()) {
      throw MissingCompilerError("EQACCEL_NVRTC names '" + ordered +
                                     "', which is not a library that opens here: set it "
                                     "to the path of libnvrtc.so or unset it",
                                 "");
    }
  } else {
    library = open_first({"libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "/opt/rocm/lib/libhiprtc.so"});
  }
  if (!library) {
    throw MissingCompilerError(
        cuda ? "NVRTC, the run-time compiler of CUDA, was not found. Install it with 'pip install nvidia-cuda-nvrtc' "
               "(CUDA 13) or 'pip install nvidia-cuda-nvrtc-cu12' (CUDA 12), or set EQACCEL_NVRTC to the path of "
               "libnvrtc.so"
             : "hipRTC, the run-time compiler of ROCm, was not found: install ROCm, or put libhiprtc.so on "
               "LD_LIBRARY_PATH",
        "");
  }
  try {
    const Table table = read_table(library, cuda);
    if (cuda) open_builtins(library, table);
    return table;
  } catch (const std::runtime_error& error) {
    throw MissingCompilerError(std::string(cuda ? "NVRTC" : "hipRTC") + " can not be used: " + error.what(), "");
  }
}

// A static local is set once, and tried again at the next call if it throws.
const Table& table(Backend backend) {
  if (backend == Backend::cuda) {
    static const Table cuda = load_table(backend);
    return cuda;
  }
  static const Table hip = load_table(backend);
  return hip;
}

// Both print resource use into the log. Neither allows fast-math; -default-device lets helpers do without __device__.
std::vector<std::string> options(Backend backend) {
  if (backend == Backend::cuda) return {"--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v"};
  return {"-std=c++17", "-O3", "-ffp-contract=fast", "-Rpass-analysis=kernel-resource-usage"};
}

std::pair<int, int> version_of(Backend backend) {
  std::pair<int, int> found;
  table(backend).version(&found.first, &found.second);
  return found;
}

}  // namespace

std::vector<std::string> find_nvrtc(const std::vector<std::string>& folders) {
  std::vector<std::pair<int, std::string>> found;  // by major version
  for (const std::string& packages : folders) {
    // CUDA 13, and CUDA 12.
    for (const char* folder : {"/nvidia/cu[0-9]*/lib", "/nvidia/cuda_nvrtc/lib"}) {
      for (const std::string& path :
           glob_paths(literal(packages.empty() ? "." : packages) + folder + "/libnvrtc.so.*")) {
        const std::string version = path.substr(path.rfind('.') + 1), start = path.substr(0, path.rfind('.'));
        const bool is_number = !version.empty() && version.find_first_not_of("0123456789") == std::string::npos;
        if (is_number && version.size() < 9 && start.substr(start.rfind('/') + 1) == "libnvrtc.so")
          found.emplace_back(std::stoi(version), path);
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> paths;
  for (auto& [version, path] : found) paths.push_back(std::move(path));
  return paths;
}

void set_package_folders(const std::vector<std::string>& folders) {
  std::lock_guard<std::mutex> lock(folders_mutex);
  package_folders = folders;
}

std::string gpu_compiler_version(Backend backend) {
  const auto [major, minor] = version_of(backend);
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string gpu_compile_options(Backend backend) {
  std::string text;
  for (const std::string& option : options(backend)) text += option + " ";
  return text;
}

GpuBinary compile_gpu(Backend backend, const std::string& source, const std::string& arch) {
  const Table& rtc = table(backend);
  const std::string who = backend == Backend::cuda ? "NVRTC" : "hipRTC";
  const auto check = [&](int status, const char* what) {
    if (status) throw CompileError(who + " could not " + what + ": " + rtc.error(status), "");
  };
  std::vector<std::string> words = options(backend);
  words.push_back((backend == Backend::cuda ? "--gpu-architecture=" : "--offload-arch=") + arch);
  // Where there is a driver, NVRTC has a cache of its own from 12.9 on, which knows the code of a program and not its log.
  if (backend == Backend::cuda && version_of(backend) >= std::pair(12, 9)) words.push_back("--no-cache");
  std::vector<const char*> arguments;
  for (const std::string& word : words) arguments.push_back(word.c_str());

  void* program = nullptr;
  check(
      rtc.create(&program, source.c_str(), backend == Backend::cuda ? "kernel.cu" : "kernel.hip", 0, nullptr, nullptr),
      "read the source");
  struct Guard {
    const Table& rtc;
    void*& program;
    ~Guard() { rtc.destroy(&program); }
  } guard{rtc, program};

  const int status = rtc.compile(program, int(arguments.size()), arguments.data());
  std::size_t size = 0;
  check(rtc.log_size(program, &size), "give its log");
  GpuBinary binary{"", std::string(size, '\0')};
  if (size) check(rtc.log(program, binary.log.data()), "give its log");
  binary.log = binary.log.c_str();  // both count the final zero
  if (status) {
    throw CompileError(who + " " + gpu_compiler_version(backend) + " failed on a kernel for " + arch + " (" +
                           rtc.error(status) + ")." + first_error(binary.log) +
                           " Set EQACCEL_DUMP to a folder to keep the source.",
                       binary.log);
  }
  check(rtc.code_size(program, &size), "give the compiled code");
  binary.code.resize(size);
  check(rtc.code(program, binary.code.data()), "give the compiled code");
  return binary;
}

Resources read_resources(const std::string& log) {
  Resources resources;
  std::map<std::string, int64_t>* kernel = nullptr;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    // ptxas: "Compiling entry function 'name' for 'sm_90'"; AMD: "Function Name: name"
    if (const auto at = line.find("Compiling entry function '"); at != std::string::npos) {
      const std::size_t start = at + 26;
      kernel = &resources[line.substr(start, line.find('\'', start) - start)];
    } else if (const auto at = line.find("Function Name: "); at != std::string::npos) {
      const std::size_t start = at + 15;
      kernel = &resources[line.substr(start, line.find(' ', start) - start)];
    }
    if (!kernel) continue;
    const auto before = [&](const char* text, const char* as) {  // "<number> text"; functions come after their kernel
      const std::size_t at = line.find(text);
      if (at == std::string::npos || at == 0) return;
      const std::size_t start = line.find_last_not_of("0123456789", at - 1) + 1;
      if (start < at) (*kernel)[as] += std::stoll(line.substr(start));
    };
    const auto after = [&](const char* text, const char* as) {  // "text: <number>"
      const std::size_t at = line.find(text);
      if (at != std::string::npos) (*kernel)[as] = std::atoll(line.c_str() + at + std::string(text).size());
    };
    before(" registers", "registers");
    before(" bytes stack frame", "stack_bytes");
    before(" bytes spill stores", "spill_store_bytes");
    before(" bytes spill loads", "spill_load_bytes");
    before(" bytes smem", "shared_bytes");
    after(" VGPRs: ", "registers");
    after("ScratchSize [bytes/lane]: ", "stack_bytes");
    after("VGPRs Spill: ", "spill_store_bytes");
    after("LDS Size [bytes/block]: ", "shared_bytes");
  }
  return resources;
}

}  // namespace eqaccel
