#include "diagnostics.h"

#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <set>
#include <sstream>

#include "gpu_compiler.h"
#include "settings.h"

namespace eqaccel {
namespace {

std::mutex mutex;

// Leaked on purpose: a handler may hold a Python object, which must not be released after the interpreter is gone.
std::function<void(const std::string&)>& handler() {
  static auto* value = new std::function<void(const std::string&)>(
      [](const std::string& message) { std::cerr << "eqaccel: warning: " << message << std::endl; });
  return *value;
}

std::function<void(const std::string&)>& progress_handler() {
  static auto* value = new std::function<void(const std::string&)>;
  return *value;
}

}  // namespace

void set_progress_handler(std::function<void(const std::string&)> value) {
  std::lock_guard<std::mutex> lock(mutex);
  progress_handler() = std::move(value);
}

void tell_progress(const std::string& message) {
  std::function<void(const std::string&)> tell;
  {
    std::lock_guard<std::mutex> lock(mutex);
    tell = progress_handler();
  }
  if (tell) tell(message);
}

void set_warning_handler(std::function<void(const std::string&)> value) {
  std::lock_guard<std::mutex> lock(mutex);
  handler() = std::move(value);
}

void warn_once(const std::string& topic, const std::string& message) {
  static auto* seen = new std::set<std::string>;
  std::function<void(const std::string&)> warn;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!seen->insert(topic).second) return;
    warn = handler();
  }
  if (warn) warn(message);  // outside the lock: it may wait for the Python interpreter
}

std::string first_error(const std::string& log) {
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);)
    if (line.find("error: ") != std::string::npos) return " It says: " + line + ".";
  return "";
}

void dump(Backend backend, Scalar scalar, Direction direction, const std::string& key, const Dumped& dumped) {
  const std::string folder = settings::dump();
  if (folder.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  const std::string stem =
      folder + "/" + name(backend) + "-" + name(direction) + "-" + name(scalar) + "-" + key.substr(0, 12);
  bool complete = true;
  const auto write = [&](const char* suffix, const std::string& content) {
    std::ofstream file(stem + suffix);
    file << content << std::flush;
    complete = complete && file;
  };
  write(backend == Backend::cpu ? ".cpp" : backend == Backend::cuda ? ".cu" : ".hip", dumped.source);
  write(".log", dumped.log);
  if (!dumped.plan.empty()) write(".plan", dumped.plan);
  std::ostringstream resources;
  for (const auto& [kernel, numbers] : read_resources(dumped.log)) {
    resources << kernel;
    for (const auto& [what, number] : numbers) resources << " " << what << "=" << number;
    resources << "\n";
  }
  write(".resources", resources.str());
  if (!complete) warn_once("dump " + folder, "EQACCEL_DUMP: can not write into '" + folder + "'");
}

}  // namespace eqaccel
