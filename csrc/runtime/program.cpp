// Programs: reading the payload, compiling through the disk cache, keeping loaded kernels.
#include "program.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <sstream>

#include "cache.h"
#include "diagnostics.h"
#include "gpu_compiler.h"
#include "gpu_driver.h"
#include "host_compiler.h"
#include "kernel.h"
#include "self_check.h"
#include "targets.h"

namespace eqaccel {
namespace {

constexpr char header[] = "EQACCEL-PAYLOAD 1\n";

std::invalid_argument bad_payload(const std::string& expected, const std::string& got) {
  return std::invalid_argument("payload: expected " + expected + ", got " + got);
}

// A whole decimal number, or an exception that says where it stands.
int64_t read_number(const std::string& text, const std::string& where) {
  try {
    std::size_t end = 0;
    const int64_t number = std::stoll(text, &end);
    if (end == text.size()) return number;
  } catch (const std::exception&) {
  }
  throw bad_payload("a whole number in " + where, "'" + text + "'");
}

std::map<std::string, std::string> read_entries(const std::string& payload) {
  if (payload.rfind(header, 0) != 0) {
    const std::string start = payload.substr(0, payload.find('\n')).substr(0, sizeof(header));
    throw bad_payload("the line 'EQACCEL-PAYLOAD 1' at the start", "'" + start + "'");
  }
  std::map<std::string, std::string> entries;
  std::size_t position = sizeof(header) - 1;
  while (position < payload.size()) {
    const std::size_t line_end = payload.find('\n', position);
    if (line_end == std::string::npos) {
      throw bad_payload("the line '<name> <size>' at byte " + std::to_string(position), "the end of the payload");
    }
    const std::string line = payload.substr(position, line_end - position);
    const std::size_t space = line.find(' ');
    if (space == 0 || space == std::string::npos) throw bad_payload("the line '<name> <size>'", "'" + line + "'");
    const std::string name = line.substr(0, space);
    const int64_t size = read_number(line.substr(space + 1), "the size of entry '" + name + "'");
    const std::size_t left = payload.size() - line_end - 1;
    if (size < 0 || uint64_t(size) >= left) {
      throw bad_payload(std::to_string(size) + " bytes and a newline for entry '" + name + "'",
                        std::to_string(left) + " bytes");
    }
    if (payload[line_end + 1 + size] != '\n') {
      throw bad_payload("a newline after entry '" + name + "'", "another character: its size is wrong");
    }
    entries[name] = payload.substr(line_end + 1, size);
    position = line_end + 2 + size;
  }
  if (!entries.count("meta")) throw bad_payload("an entry 'meta'", std::to_string(entries.size()) + " other entries");
  return entries;
}

std::map<std::string, int64_t> read_numbers(const std::string& meta) {
  std::map<std::string, int64_t> numbers;
  std::istringstream lines(meta);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos) throw bad_payload("'key=value' in entry 'meta'", "'" + line + "'");
    numbers[line.substr(0, equals)] = read_number(line.substr(equals + 1), "meta '" + line.substr(0, equals) + "'");
  }
  return numbers;
}

// An entry that is made for one target.
std::string target_entry(const std::string& kind, const std::string& target, Scalar scalar, Direction direction) {
  return kind + "/" + target + "/" + name(direction) + "/" + name(scalar);
}

std::string figures_name(Direction direction) { return std::string("check/") + name(direction); }

}  // namespace

const char* name(Backend backend) {
  return backend == Backend::cpu ? "cpu" : backend == Backend::cuda ? "cuda" : "hip";
}

const char* name(Scalar scalar) { return scalar == Scalar::float32 ? "float32" : "float64"; }

const char* name(Direction direction) {
  return direction == Direction::forward ? "forward" : direction == Direction::backward ? "backward" : "double_backward";
}

struct Program::Slot {
  std::mutex mutex;
  std::unique_ptr<Kernel> kernel;
};

Program::Program(const uint8_t* payload, std::size_t size)
    : entries_(read_entries(std::string(reinterpret_cast<const char*>(payload), size))),
      numbers_(read_numbers(entries_.at("meta"))) {
  const auto found = numbers_.find("abi");
  if (found != numbers_.end() && found->second != EQ_ABI) {
    throw bad_payload("kernels of interface " + std::to_string(EQ_ABI) + ", which the installed eqaccel launches",
                      "interface " + std::to_string(found->second) + ": make or export the model again with it");
  }
}

int64_t Program::number(const std::string& key) const {
  const auto found = numbers_.find(key);
  if (found == numbers_.end()) throw std::out_of_range("the payload's meta entry has no '" + key + "'");
  return found->second;
}

std::string Program::sealed_target(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  for (const std::string& target : usable_targets(backend, arch)) {
    if (!entries_.count(target_entry("binary", target, scalar, direction))) continue;
    // A later minor revision may have less shared memory than the one that the binary was made for.
    if (backend == Backend::cpu ||
        shared_bytes(target_body(backend, scalar, direction, target)) <= available_shared_bytes(backend, arch))
      return target;
  }
  return "";
}

int64_t Program::shared_bytes(const std::string& body) const {
  const auto kernels = numbers_.find(body + "/kernels");
  int64_t most = 0;  // where the numbers say nothing, as for polynomials
  for (int64_t n = 0; kernels != numbers_.end() && n < kernels->second; ++n)
    most = std::max(most, number(body + "/" + std::to_string(n) + "/shared_bytes"));
  return most;
}

int64_t Program::available_shared_bytes(Backend backend, const std::string& arch) const {
  constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();
  if (arch.empty()) return unlimited;
  const auto known = numbers_.find("shared_bytes/" + arch.substr(0, arch.find(':')));
  if (known != numbers_.end()) return std::min(known->second, shared_bytes_limit());
  for (int device = 0; device < GpuDriver::device_count(backend); ++device) {
    const DeviceInfo& info = GpuDriver::get(backend).device(device);
    if (info.arch == arch) return info.shared_bytes_per_block;
  }
  return 0;  // of an architecture that nothing is known of: whatever takes least
}

std::string Program::target_body(Backend backend, Scalar scalar, Direction direction, const std::string& target) const {
  const std::string tuned = target_entry("tuned", target, scalar, direction);
  if (entries_.count(tuned)) return tuned;
  if (backend == Backend::cpu) return std::string("cpu/") + name(direction);
  const std::string ending = std::string("/") + name(direction) + "/" + name(scalar);
  const int64_t available = available_shared_bytes(backend, target);
  std::string fitting, smallest;
  for (const auto& [entry, text] : entries_) {
    const bool is_body = entry.rfind("gpu", 0) == 0 && entry.size() > ending.size() &&
                         entry.compare(entry.size() - ending.size(), ending.size(), ending) == 0;
    if (!is_body) continue;
    const int64_t taken = shared_bytes(entry);
    if (smallest.empty() || taken < shared_bytes(smallest)) smallest = entry;
    if (taken <= available && (fitting.empty() || taken > shared_bytes(fitting))) fitting = entry;
  }
  if (!fitting.empty()) return fitting;
  if (!smallest.empty() && available == 0) return smallest;
  throw CompileError(std::string("no plan of the ") + name(scalar) + " " + name(direction) + " kernel fits the " +
                         std::to_string(available) + " bytes of shared memory of a block of " + target +
                         ": divide the channels of the tensor product among several" +
                         (scalar == Scalar::float64 ? ", or run it in float32" : ""),
                     "");
}

std::string Program::body(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  // A binary was made from the body of its own target, and is launched with the numbers of that.
  std::string target = sealed_target(backend, scalar, direction, arch);
  if (target.empty()) target = usable_targets(backend, arch).front();
  return target_body(backend, scalar, direction, target);
}

std::string Program::source(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  // Preludes leave out what a direction does not need.
  const std::string text = "#define EQ_DIRECTION " + std::to_string(static_cast<int>(direction)) + "\n#define EQ_SCALAR " +
                     (scalar == Scalar::float32 ? "float" : "double") + "\n";
  const std::string of = body(backend, scalar, direction, arch);
  const auto code = numbers_.find(of + "/code");
  return text + entry(std::string("prelude/") + name(backend)) + entry(of) +
         (code == numbers_.end() ? "" : entry("code/" + std::to_string(code->second)));
}

const std::string& Program::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw std::out_of_range("the payload has no entry '" + name + "'");
  return found->second;
}

Compiled Program::compile(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  if (const std::string target = sealed_target(backend, scalar, direction, arch); !target.empty()) {
    return {entry(target_entry("binary", target, scalar, direction)), "", "sealed-" + target, "", 0, true};
  }
  const auto start = std::chrono::steady_clock::now();
  const std::string text = source(backend, scalar, direction, arch);
  const bool checked = entries_.count(figures_name(direction)) > 0;
  HostCompiler host;
  std::string key;
  if (backend == Backend::cpu) {
    host = find_host_compiler();
    std::string command;
    for (const auto& words : {host.command, host_compile_flags()}) {
      for (const std::string& word : words) command += word + " ";
    }
    // Kernels that were never checked have other keys: finding one must not stand for a check.
    key = cache::key({checked ? "cpu, checked" : "cpu", text, host_target(), command, host.version});
  } else {
    if (arch.empty()) throw std::invalid_argument("arch: expected an architecture such as 'sm_90' or 'gfx90a', got ''");
    key = cache::key({name(backend), text, arch, gpu_compiler_version(backend), gpu_compile_options(backend)});
  }

  const std::string entry_name = key + (backend == Backend::cpu ? ".so" : ".bin");
  std::optional<cache::Entry> entry = cache::read(entry_name);
  const bool cached = entry.has_value();
  bool stored = cached;
  if (!cached) {
    entry.emplace();
    try {
      if (backend == Backend::cpu) {
        entry->code = compile_host(host, text, entry->log);
        if (checked) check(entry->code, entry->log, host.version, scalar, direction);
      } else {
        GpuBinary binary = compile_gpu(backend, text, arch);
        *entry = {std::move(binary.code), std::move(binary.log)};
      }
    } catch (const CompileError& error) {
      dump(backend, scalar, direction, key, text, error.log);
      throw;
    }
    stored = cache::write(entry_name, *entry);
  }
  dump(backend, scalar, direction, key, text, entry->log);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {std::move(entry->code), std::move(entry->log), key, stored ? cache::path(entry_name) : "", seconds, cached};
}

void Program::check(const std::string& code, const std::string& log, const std::string& compiler, Scalar scalar,
                    Direction direction) const {
  const cache::Scratch scratch;
  const std::string path = scratch.path() + "/kernel.so";
  cache::write_file(path, code);
  const std::string differences = self_check(*open_cpu_kernel(code, path), scalar, direction, entry("check/blocks"),
                                             entry(figures_name(direction)));
  if (differences.empty()) return;
  throw CompileError(std::string("the ") + name(scalar) + " " + name(direction) + " kernel for the CPU computes wrong "
                     "results as '" + compiler + "' compiled it, so it is not used. Point EQACCEL_CXX to another "
                     "compiler (clang++, or another version of g++), and please report this with what EQACCEL_DUMP "
                     "writes.", log + "self-check:\n" + differences);
}

const Kernel& Program::kernel(Backend backend, Scalar scalar, Direction direction, int device) const {
  if (backend == Backend::cpu) device = 0;
  const uint64_t index = uint64_t(device) << 8 | uint64_t(backend) << 4 | uint64_t(scalar) << 2 | uint64_t(direction);
  std::shared_ptr<Slot> slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Slot>& found = slots_[index];
    if (!found) found = std::make_shared<Slot>();
    slot = found;
  }
  std::lock_guard<std::mutex> lock(slot->mutex);
  if (!slot->kernel) {
    if (backend == Backend::cpu) slot->kernel = load_cpu_kernel(*this, scalar, direction);
    else slot->kernel = (numbers_.count("row_threads") ? load_row_kernel : load_gpu_kernel)(*this, backend, scalar,
                                                                                            direction, device);
  }
  return *slot->kernel;
}

std::size_t Program::workspace_bytes(Backend backend, Scalar scalar, Direction direction, const eq_operands& operands,
                                     int device) const {
  if (device < 0 && backend != Backend::cpu) device = GpuDriver::get(backend).current_device();
  return kernel(backend, scalar, direction, device).workspace_bytes(operands);
}

void Program::launch(Backend backend, Scalar scalar, Direction direction, const eq_operands& operands, int device,
                     void* stream) const {
  kernel(backend, scalar, direction, device).launch(operands, stream);
}

}  // namespace eqaccel
