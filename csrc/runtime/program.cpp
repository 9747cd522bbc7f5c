// Programs: reading the payload, compiling through the disk cache, keeping loaded kernels.
#include "program.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <locale>
#include <set>
#include <sstream>

#include "cache.h"
#include "diagnostics.h"
#include "digest.h"
#include "families.h"
#include "gpu_compiler.h"
#include "gpu_driver.h"
#include "host_compiler.h"
#include "kernel.h"
#include "self_check.h"
#include "settings.h"
#include "targets.h"

namespace eqaccel {
namespace {

// An entry that is made for one target.
std::string target_entry(const std::string& kind, const std::string& target, Scalar scalar, Direction direction) {
  return kind + "/" + target + "/" + name(direction) + "/" + name(scalar);
}

std::string checksums_name(Direction direction) { return std::string("check/") + name(direction); }
// Of a batch whose rows share their weights, where kernels add up the gradients of these.
std::string summed_checksums_name(Direction direction) { return checksums_name(direction) + "/summed"; }

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += word + " ";
  return text;
}

// All that a kernel hangs on besides the compiler: the start of its name in the cache.
std::string source_key(Backend backend, const std::string& text, const std::string& arch, bool checked) {
  if (backend != Backend::cpu) return cache::key({name(backend), text, arch, gpu_compile_options(backend)});
  return cache::key({checked ? "cpu, checked" : "cpu", text, instruction_sets(), join(host_compile_flags())});
}

}  // namespace

// What compiles for a backend; `key` is the end of the names of its kernels in the cache.
struct Program::Tools {
  HostCompiler host;  // of the CPU
  std::string key;
};

Program::Tools Program::find_tools(Backend backend) {
  if (backend != Backend::cpu) return {{}, cache::key({gpu_compiler_version(backend)}).substr(0, 16)};
  HostCompiler host = find_host_compiler();
  const std::string key = cache::key({join(host.command), host.version}).substr(0, 16);
  return {std::move(host), key};
}

const char* name(Backend backend) {
  return backend == Backend::cpu ? "cpu" : backend == Backend::cuda ? "cuda" : "hip";
}

const char* name(Scalar scalar) { return scalar == Scalar::float32 ? "float32" : "float64"; }

const char* name(Direction direction) {
  constexpr const char* names[] = {"forward", "backward", "double_backward", "triple_backward"};
  return names[static_cast<int>(direction)];
}

std::string translation_unit(Scalar scalar, Direction direction, const std::string& prelude, const std::string& body) {
  // Preludes leave out what a direction does not need.
  return "#define EQ_DIRECTION " + std::to_string(static_cast<int>(direction)) + "\n#define EQ_SCALAR " +
         (scalar == Scalar::float32 ? "float" : "double") + "\n" + prelude + body;
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
  family_ = &find_family(read_family(entries_.at("meta")));
}

int64_t Program::number(const std::string& key) const {
  const auto found = numbers_.find(key);
  if (found == numbers_.end()) throw std::out_of_range("the payload's meta entry has no '" + key + "'");
  return found->second;
}

bool Program::has_checksums(Direction direction) const { return entries_.count(checksums_name(direction)) > 0; }

std::string Program::plan(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  return optional_entry("plan/" + body(backend, scalar, direction, arch));
}

std::string Program::precompiled_target(Backend backend, Scalar scalar, Direction direction,
                                        const std::string& arch) const {
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
  if (known != numbers_.end()) return std::min(known->second, settings::shared_bytes());
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
  const std::string own = "gpu-" + std::to_string(available / 1024) + ending;
  if (available % 1024 == 0 && entries_.count(own)) return own;
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
  throw SharedMemoryError(std::string("no plan of the ") + name(scalar) + " " + name(direction) + " kernel fits the " +
                              std::to_string(available) + " bytes of shared memory of a block of " + target +
                              ": divide the channels of the tensor product among several" +
                              (scalar == Scalar::float64 ? ", or run it in float32" : ""),
                          "");
}

std::string Program::body(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  // A binary was made from the body of its own target, and is launched with the numbers of that.
  std::string target = precompiled_target(backend, scalar, direction, arch);
  if (target.empty()) target = usable_targets(backend, arch).front();
  return target_body(backend, scalar, direction, target);
}

std::string Program::source(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  const std::string of = body(backend, scalar, direction, arch);
  const auto code = numbers_.find(of + "/code");
  return translation_unit(scalar, direction, entry(std::string("prelude/") + name(backend)),
                          entry(of) + (code == numbers_.end() ? "" : entry("code/" + std::to_string(code->second))));
}

std::string Program::optional_entry(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? "" : found->second;
}

std::string Program::tables_text(Direction direction) const {
  return optional_entry(std::string("tables/cpu/") + name(direction));
}

Tables Program::tables(Direction direction) const { return read_tables(tables_text(direction)); }

const std::string& Program::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw std::out_of_range("the payload has no entry '" + name + "'");
  return found->second;
}

std::vector<std::pair<int64_t, int64_t>> Program::blocks(char kind) const {
  std::istringstream lines(entry("check/blocks"));
  lines.imbue(std::locale::classic());
  std::vector<std::pair<int64_t, int64_t>> found;
  char of = 0;
  for (int64_t channels = 0, components = 0; lines >> of >> channels >> components;)
    if (of == kind) found.emplace_back(channels, components);
  return found;
}

Compiled Program::compile(Backend backend, Scalar scalar, Direction direction, const std::string& arch) const {
  if (const std::string target = precompiled_target(backend, scalar, direction, arch); !target.empty()) {
    const std::string& code = entry(target_entry("binary", target, scalar, direction));
    if (backend == Backend::cpu) check_once(code, "as the model's file holds it for " + target, scalar, direction);
    return {code, "", "precompiled-" + target, "", 0, true};
  }
  if (backend != Backend::cpu && arch.empty()) {
    throw std::invalid_argument("arch: expected an architecture such as 'sm_90' or 'gfx90a', got ''");
  }
  const auto start = std::chrono::steady_clock::now();
  const std::string text = source(backend, scalar, direction, arch);
  // Kernels that were never checked have other keys: finding one must not stand for a check.
  const bool checked = backend == Backend::cpu && has_checksums(direction);
  const std::string base = source_key(backend, text, arch, checked), suffix = backend == Backend::cpu ? ".so" : ".bin";
  Tools tools;
  std::string key;
  try {
    tools = find_tools(backend);
    key = base + "-" + tools.key;
  } catch (const MissingCompilerError&) {
    // A compute node without a compiler takes what any compiler made of this source for this kind of machine.
    key = cache::newest(base + "-", suffix);
    if (key.empty()) throw;
    key.resize(key.size() - suffix.size());
  }

  const std::string file = key + suffix;
  std::optional<cache::Entry> entry = cache::read(file);
  bool cached = entry.has_value(), stored = cached;
  if (!cached) {
    if (tools.key.empty()) tools = find_tools(backend);  // no compiler, and what was found is damaged: says so
    const cache::Lock lock(file);
    entry = cache::read(file);  // another process may have made it meanwhile
    cached = stored = entry.has_value();
    if (!cached) {
      try {
        entry = make(tools, backend, scalar, direction, arch, text);
      } catch (const CompileError& error) {
        dump(backend, scalar, direction, key, {text, error.log, plan(backend, scalar, direction, arch)});
        throw;
      }
      stored = cache::write(file, *entry);
    }
  }
  // Another spec may have brought the kernel here, with tables of its own.
  if (cached && checked && !tables_text(direction).empty())
    check_once(entry->code, "as the cache holds it", scalar, direction);
  cache::count(cached);
  dump(backend, scalar, direction, key, {text, entry->log, plan(backend, scalar, direction, arch)});
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {std::move(entry->code), std::move(entry->log), key, stored ? cache::path(file) : "", seconds, cached};
}

std::string Program::described(Scalar scalar, Direction direction) const {
  return std::string("the ") + name(scalar) + " " + name(direction) + " kernel (" + std::to_string(number("x_dim")) +
         " to " + std::to_string(number("z_dim")) + " features)";
}

cache::Entry Program::make(const Tools& tools, Backend backend, Scalar scalar, Direction direction,
                           const std::string& arch, const std::string& text) const {
  if (backend != Backend::cpu) {
    GpuBinary binary = compile_gpu(backend, text, arch);
    return {std::move(binary.code), std::move(binary.log)};
  }
  cache::Entry entry;
  entry.code = compile_host(tools.host, text, entry.log, "", described(scalar, direction));
  check(entry.code, scalar, direction, "as '" + tools.host.version + "' compiled it", entry.log);
  return entry;
}

std::string Program::compile_for(const std::string& target, Scalar scalar, Direction direction,
                                 const std::string& source, std::string& log) const {
  const HostCompiler host = find_host_compiler();
  const std::string code = compile_host(host, source, log, target, described(scalar, direction));
  const std::vector<std::string> usable = usable_targets(Backend::cpu, "");
  const bool runs_here = std::find(usable.begin(), usable.end(), target) != usable.end();
  if (runs_here) check(code, scalar, direction, "as '" + host.version + "' compiled it for " + target, log);
  return code;
}

void Program::check(const std::string& code, Scalar scalar, Direction direction, const std::string& made,
                    const std::string& log) const {
  if (!has_checksums(direction)) return;
  RowSizes sizes{number("x_dim"),
                 number("y_dim"),
                 number("z_dim"),
                 number("w_dim"),
                 numbers_.count("shared_weights") > 0,
                 reads_bfloat16(scalar, direction),
                 false};
  const std::unique_ptr<Kernel> kernel = open_cpu_kernel(code, tables(direction));
  const auto differ = [&](const std::string& checksums) {
    return self_check(*kernel, scalar, direction, sizes, entry("check/blocks"), entry(checksums));
  };
  std::string differences = differ(checksums_name(direction));
  const std::string of_batch = summed_checksums_name(direction);
  if (entries_.count(of_batch)) {
    sizes.summed_weights = true;
    differences += differ(of_batch);
  }
  if (differences.empty()) return;
  throw CompileError(std::string("the ") + name(scalar) + " " + name(direction) +
                         " kernel for the CPU computes wrong "
                         "results " +
                         made +
                         ", so it is not used. Point EQACCEL_CXX to another compiler (clang++, or "
                         "another version of g++)" +
                         (log.empty() ? " and export the model again" : "") +
                         ", and please "
                         "report this with what EQACCEL_DUMP writes.",
                     log + "self-check:\n" + differences);
}

void Program::check_once(const std::string& code, const std::string& made, Scalar scalar, Direction direction) const {
  if (!has_checksums(direction)) return;
  const std::string mark =
      cache::key({"checked", sha256(code), tables_text(direction), entry("check/blocks"),
                  entry(checksums_name(direction)), optional_entry(summed_checksums_name(direction)), name(scalar),
                  name(direction), instruction_sets()}) +
      ".ok";
  static auto* const mutex = new std::mutex;
  static auto* const passed = new std::set<std::string>;
  const std::lock_guard<std::mutex> lock(*mutex);
  if (passed->count(mark)) return;
  if (!cache::read(mark)) {
    check(code, scalar, direction, made, "");
    cache::write(mark, {}, false);  // without a cache every process checks for itself: nothing to warn of
  }
  passed->insert(mark);
}

void Program::load(Backend backend, Scalar scalar, Direction direction, int device) const {
  family_->load(*this, backend, scalar, direction, device);
}

const Kernel& Program::kernel(Backend backend, Scalar scalar, Direction direction, int device) const {
  if (!family_->load_gpu_kernel &&
      !(backend == Backend::cpu && family_->compile_arch(*this, backend, scalar, direction, "")))
    throw std::invalid_argument(std::string("payload: expected a family whose kernels take eq_operands, got ") +
                                family_->name);
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
    else slot->kernel = family_->load_gpu_kernel(*this, backend, scalar, direction, device);
  }
  return *slot->kernel;
}

std::size_t Program::workspace_bytes(Backend backend, Scalar scalar, Direction direction, const eq_operands& operands,
                                     int device) const {
  if (device < 0 && backend != Backend::cpu) device = GpuDriver::get(backend).current_device();
  return kernel(backend, scalar, direction, device).workspace_bytes(operands);
}

void Kernel::launch_shared(const eq_operands&, const int32_t*, void*) const {
  throw std::invalid_argument(
      "payload: expected kernels for rows of weights that edges share, got kernels without. Make the module again, or "
      "give every edge weights of its own.");
}
void Kernel::launch_slots(const eq_operands& operands, const int32_t* shared, const SlotRange&, void* stream) const {
  Kernel::launch_shared(operands, shared, stream);  // throws
}
std::size_t Kernel::slots_workspace_bytes(const eq_operands& operands, int64_t) const {
  return workspace_bytes(operands);
}

}  // namespace eqaccel
