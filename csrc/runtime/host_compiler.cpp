#include "host_compiler.h"

#include <fstream>
#include <mutex>
#include <sstream>

#include "cache.h"
#include "diagnostics.h"
#include "digest.h"
#include "process.h"
#include "targets.h"

namespace eqaccel {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::istringstream words(text);
  std::vector<std::string> parts;
  for (std::string word; words >> word;) parts.push_back(word);
  return parts;
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : " ") + part;
  return text;
}

// Asked once per compiler and process: it costs a few milliseconds.
std::string read_version(const std::vector<std::string>& command) {
  static std::mutex mutex;
  static std::map<std::string, std::string> known;
  std::lock_guard<std::mutex> lock(mutex);
  std::string& version = known[join(command)];
  if (version.empty()) {
    cache::Scratch scratch;
    std::vector<std::string> ask = command;
    ask.push_back("--version");
    const ProcessResult result = run_process(ask, scratch.path() + "/version");
    version = result.output.substr(0, result.output.find('\n'));
    if (result.status != 0 || version.empty()) {
      version.clear();
      throw MissingCompilerError("'" + join(ask) + "' failed, so it can not be used as the host C++ compiler: install "
                                 "g++ 9 or newer or clang++ 10 or newer, or point EQACCEL_CXX to one", result.output);
    }
  }
  return version;
}

}  // namespace

HostCompiler find_host_compiler() {
  // A variable that names a compiler is an order: if it can not be followed, silently using another would mislead.
  for (const char* variable : {"EQACCEL_CXX", "CXX"}) {
    std::vector<std::string> command = split(environment(variable));
    if (command.empty()) continue;
    const std::string path = find_executable(command[0]);
    if (path.empty()) {
      throw MissingCompilerError(std::string(variable) + " names '" + command[0] + "', which is not an executable: set " +
                                 "it to a C++ compiler (g++ 9 or newer, clang++ 10 or newer) or unset it", "");
    }
    command[0] = path;
    return {command, read_version(command)};
  }
  for (const char* name : {"g++", "clang++", "c++"}) {
    const std::string path = find_executable(name);
    if (!path.empty()) return {{path}, read_version({path})};
  }
  throw MissingCompilerError("no C++ compiler on PATH (looked for g++, clang++ and c++): kernels for the CPU need one. "
                             "Install it, for instance with 'apt install g++' or 'conda install cxx-compiler', or "
                             "point EQACCEL_CXX to one. An exported model can also hold its kernels: export it "
                             "with seal=[...] for the CPUs that it will run on", "");
}

std::vector<std::string> host_compile_flags(const std::string& target) {
  std::vector<std::string> flags{"-std=c++17", "-O2"};
  for (const std::string& flag : cpu_target_flags(target)) flags.push_back(flag);
  for (const char* flag : {"-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC",
                           "-fvisibility=hidden", "-w"})
    flags.push_back(flag);
  return flags;
}

std::string host_target() {
  static const std::string target = [] {
    std::ifstream cpuinfo("/proc/cpuinfo");
    for (std::string line; std::getline(cpuinfo, line);) {
      if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) return sha256(line).substr(0, 16);
    }
    return std::string("unknown");
  }();
  return target;
}

std::string compile_host(const HostCompiler& compiler, const std::string& source, std::string& log,
                         const std::string& target) {
  cache::Scratch scratch;
  const std::string input = scratch.path() + "/kernel.cpp", output = scratch.path() + "/kernel.so";
  cache::write_file(input, source);
  std::vector<std::string> command = compiler.command;
  for (const std::string& flag : host_compile_flags(target)) command.push_back(flag);
  command.insert(command.end(), {"-o", output, input});

  const ProcessResult result = run_process(command, scratch.path() + "/log");
  const std::string said = "$ " + join(command) + "\n" + result.output;
  if (result.status != 0 || !std::ifstream(output)) {
    throw CompileError("the host compiler failed (exit status " + std::to_string(result.status) + ") on a CPU kernel. "
                       "Set EQACCEL_DUMP to a folder to keep the source.", said);
  }
  log = said;
  return cache::read_file(output);
}

}  // namespace eqaccel
