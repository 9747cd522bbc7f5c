#include "targets.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "digest.h"

namespace eqaccel {
namespace {

struct CpuTarget {
  const char* name;
  const char* flags;
  const char* features;  // as /proc/cpuinfo spells them: all that the flags let a compiler use
};

// Best first.
constexpr CpuTarget cpu_targets[] = {
#if defined(__x86_64__)
    {"cpu-avx512", "-march=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl avx2 bmi1 bmi2 f16c fma abm movbe"},
    {"cpu-avx2", "-march=x86-64-v3", "avx2 bmi1 bmi2 f16c fma abm movbe"},
    {"cpu-generic", "-march=x86-64", ""},
#elif defined(__aarch64__)
    {"cpu-neon", "-march=armv8-a", ""},
#else
    {"cpu-generic", "", ""},
#endif
};

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

// The line of this CPU's instruction sets, "" if the system does not tell.
const std::string& features_line() {
  static const std::string line = [] {
    std::ifstream cpuinfo("/proc/cpuinfo");
    for (std::string line; std::getline(cpuinfo, line);)
      if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) return line;
    return std::string();
  }();
  return line;
}

std::vector<std::string> usable_cpu_targets() {
  static const std::set<std::string> present = [] {
    const std::vector<std::string> listed = words(features_line().substr(features_line().find(':') + 1));
    return std::set<std::string>(listed.begin(), listed.end());
  }();
  std::vector<std::string> usable;
  for (const CpuTarget& target : cpu_targets) {
    const std::vector<std::string> needed = words(target.features);
    const bool runs = std::all_of(needed.begin(), needed.end(), [&](const auto& name) { return present.count(name); });
    if (runs) usable.push_back(target.name);
  }
  return usable;
}

}  // namespace

std::vector<std::string> cpu_target_flags(const std::string& target) {
#if defined(__x86_64__) || defined(__i386__)
  if (target.empty()) return {"-march=native"};
#elif defined(__aarch64__) || defined(__powerpc64__)
  if (target.empty()) return {"-mcpu=native"};
#else
  if (target.empty()) return {};
#endif
  std::string known;
  for (const CpuTarget& row : cpu_targets) {
    if (target == row.name) return words(row.flags);
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw std::invalid_argument("target: the compiler of this machine makes kernels for " + known + ", not for '" +
                              target + "': compile on a machine of that kind");
}

std::vector<std::string> usable_targets(Backend backend, const std::string& arch) {
  if (backend == Backend::cpu) return usable_cpu_targets();
  std::vector<std::string> usable{arch};
  // A CUDA binary runs on later minor revisions of its compute capability, an AMD one on its own architecture alone.
  if (backend == Backend::cuda && arch.size() > 3 && std::isdigit(static_cast<unsigned char>(arch.back()))) {
    const std::string major = arch.substr(0, arch.size() - 1);
    for (char minor = arch.back() - 1; minor >= '0'; --minor) usable.push_back(major + minor);
  }
  return usable;
}

std::string instruction_sets() {
  const std::string& line = features_line();
  return line.empty() ? "unknown" : sha256(line).substr(0, 16);
}

}  // namespace eqaccel
