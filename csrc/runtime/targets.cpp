#include "targets.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <stdexcept>

#include "diagnostics.h"

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

std::set<std::string> read_features() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    const std::vector<std::string> found = words(line.substr(line.find(':') + 1));
    return {found.begin(), found.end()};
  }
  return {};
}

std::vector<std::string> usable_cpu_targets() {
  static const std::set<std::string> present = read_features();
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

int64_t shared_bytes_limit() {
  const std::string value = environment("EQACCEL_SHARED_KIB");
  if (value.empty()) return std::numeric_limits<int64_t>::max();
  int64_t kib = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), kib);
  if (error != std::errc() || end != value.data() + value.size() || kib < 1 || kib > 1024) {
    throw std::invalid_argument("environment variable EQACCEL_SHARED_KIB: expected a whole number from 1 to 1024, got '" +
                                value + "'");
  }
  return kib * 1024;
}

}  // namespace eqaccel
