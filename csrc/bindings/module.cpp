// Python bindings of the runtime (eqaccel._runtime). Long work releases the interpreter lock.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <optional>

#include "cache.h"
#include "diagnostics.h"
#include "families.h"
#include "gpu_compiler.h"
#include "gpu_driver.h"
#include "host_compiler.h"
#include "kernel.h"
#include "process.h"
#include "self_check.h"
#include "settings.h"
#include "targets.h"
#include "third.h"
#include "trust.h"

namespace py = pybind11;
using namespace eqaccel;

namespace {

template <typename Enum>
Enum parse(const char* what, const std::string& text, std::initializer_list<Enum> choices) {
  std::string expected;
  for (Enum choice : choices) {
    if (text == name(choice)) return choice;
    expected += (expected.empty() ? "" : ", ") + std::string(name(choice));
  }
  throw std::invalid_argument(std::string(what) + ": expected one of " + expected + ", got '" + text + "'");
}

Backend parse_backend(const std::string& text) {
  return parse("backend", text, {Backend::cpu, Backend::cuda, Backend::hip});
}
Scalar parse_scalar(const std::string& text) { return parse("scalar", text, {Scalar::float32, Scalar::float64}); }
Direction parse_direction(const std::string& text) {
  return parse("direction", text,
               {Direction::forward, Direction::backward, Direction::double_backward, Direction::triple_backward});
}

const uint8_t* bytes_of(const std::string_view& text) { return reinterpret_cast<const uint8_t*>(text.data()); }

py::dict describe(const Compiled& compiled) {
  py::dict result;
  result["log"] = compiled.log;
  result["resources"] = read_resources(compiled.log);
  result["seconds"] = compiled.seconds;
  result["cached"] = compiled.cached;
  result["key"] = compiled.key;
  result["path"] = compiled.path;
  return result;
}

py::dict compile(const Program& program, const std::string& backend, const std::string& scalar,
                 const std::string& direction, const std::optional<std::string>& arch) {
  Compiled compiled;
  {
    py::gil_scoped_release release;
    compiled =
        program.compile(parse_backend(backend), parse_scalar(scalar), parse_direction(direction), arch.value_or(""));
  }
  return describe(compiled);
}

py::tuple compile_source(Backend backend, const std::string& source, const std::string& arch) {
  GpuBinary binary;
  {
    py::gil_scoped_release release;
    binary = compile_gpu(backend, source, arch);
  }
  return py::make_tuple(py::bytes(binary.code), binary.log);
}

// The address that an operand stands for: of a NumPy array, or given as a whole number (memory of a GPU).
void* address(const std::string& name, const py::handle& value, bool integers, bool written, Scalar scalar,
              bool rounded = false) {
  if (value.is_none()) return nullptr;
  if (py::isinstance<py::int_>(value)) return reinterpret_cast<void*>(value.cast<uintptr_t>());
  auto array = py::reinterpret_borrow<py::array>(value);
  if (!py::isinstance<py::array>(value)) throw std::invalid_argument(name + ": expected a NumPy array or an address");
  const bool any = name == "workspace";
  const py::dtype expected = integers                    ? py::dtype::of<int32_t>()
                             : rounded                   ? py::dtype::of<uint16_t>()
                             : scalar == Scalar::float32 ? py::dtype::of<float>()
                                                         : py::dtype::of<double>();
  if (!any && !array.dtype().is(expected)) {
    throw std::invalid_argument(name + ": expected dtype " + py::str(expected).cast<std::string>() + ", got " +
                                py::str(array.dtype()).cast<std::string>());
  }
  if (!(array.flags() & py::array::c_style)) throw std::invalid_argument(name + ": expected a contiguous array");
  return written ? array.mutable_data() : const_cast<void*>(array.data());
}

// `rounded`: weights are the bits of bfloat16.
eq_operands read_operands(const py::dict& values, Scalar scalar, bool rounded) {
  eq_operands o{};
  o.deterministic = 1;
  o.threads = 1;
  const std::map<std::string, const void**> inputs = {{"x", &o.x}, {"y", &o.y}, {"w", &o.w}, {"gz", &o.gz},
                                                      {"a", &o.a}, {"b", &o.b}, {"c", &o.c}, {"p", &o.p},
                                                      {"q", &o.q}, {"r", &o.r}, {"g", &o.g}};
  const std::map<std::string, void**> outputs = {
      {"z", &o.z},   {"gx", &o.gx}, {"gy", &o.gy}, {"gw", &o.gw},
      {"ga", &o.ga}, {"gb", &o.gb}, {"gc", &o.gc}, {"workspace", &o.workspace}};
  const std::map<std::string, const int32_t**> indices = {{"row_ptr", &o.row_ptr},
                                                          {"edge", &o.edge},
                                                          {"sender", &o.sender},
                                                          {"t_row_ptr", &o.t_row_ptr},
                                                          {"t_slot", &o.t_slot}};
  const std::map<std::string, int64_t*> sizes = {{"num_receivers", &o.num_receivers}, {"num_senders", &o.num_senders},
                                                 {"num_edges", &o.num_edges},         {"w_stride", &o.w_stride},
                                                 {"c_stride", &o.c_stride},           {"r_stride", &o.r_stride}};
  const std::map<std::string, int32_t*> flags = {
      {"mul_ir", &o.mul_ir}, {"deterministic", &o.deterministic}, {"threads", &o.threads}};
  for (const auto& [key, value] : values) {
    const auto name = key.cast<std::string>();
    if (const auto found = inputs.find(name); found != inputs.end()) {
      *found->second = address(name, value, false, false, scalar, rounded && name == "w");
    } else if (const auto found = outputs.find(name); found != outputs.end()) {
      *found->second = address(name, value, false, true, scalar);
    } else if (const auto found = indices.find(name); found != indices.end()) {
      *found->second = static_cast<const int32_t*>(address(name, value, true, false, scalar));
    } else if (const auto found = sizes.find(name); found != sizes.end()) {
      *found->second = value.cast<int64_t>();
    } else if (const auto found = flags.find(name); found != flags.end()) {
      *found->second = value.cast<int32_t>();
    } else {
      throw std::invalid_argument("operands: expected the fields of eq_operands, got '" + name + "'");
    }
  }
  return o;
}

void launch(const Program& program, const std::string& backend_name, const std::string& scalar_name,
            const std::string& direction_name, const py::dict& values, int device, uintptr_t stream) {
  const Backend backend = parse_backend(backend_name);
  const Scalar scalar = parse_scalar(scalar_name);
  const Direction direction = parse_direction(direction_name);
  eq_operands operands = read_operands(values, scalar, program.reads_bfloat16(scalar, direction));
  py::gil_scoped_release release;
  const Kernel& kernel = program.kernel(backend, scalar, direction, device);
  std::vector<double> workspace;
  if (backend == Backend::cpu && !operands.workspace) {
    // Aligned for any SIMD type, which std::vector does not promise.
    workspace.resize(kernel.workspace_bytes(operands) / sizeof(double) + 9);
    operands.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  }
  kernel.launch(operands, reinterpret_cast<void*>(stream));
}

std::size_t workspace_bytes(const Program& program, const std::string& backend, const std::string& scalar,
                            const std::string& direction, const py::dict& values, int device) {
  const Scalar of = parse_scalar(scalar);
  const Direction to = parse_direction(direction);
  const eq_operands operands = read_operands(values, of, program.reads_bfloat16(of, to));
  py::gil_scoped_release release;
  return program.workspace_bytes(parse_backend(backend), of, to, operands, device);
}

py::list devices(Backend backend) {
  py::list result;
  for (int i = 0; i < GpuDriver::device_count(backend); ++i) {
    const DeviceInfo& info = GpuDriver::get(backend).device(i);
    py::dict entry;
    entry["name"] = info.name;
    entry["arch"] = info.arch;
    entry["multiprocessors"] = info.multiprocessors;
    entry["warp_size"] = info.warp_size;
    entry["shared_bytes_per_block"] = info.shared_bytes_per_block;
    entry["shared_bytes_per_multiprocessor"] = info.shared_bytes_per_multiprocessor;
    entry["registers_per_multiprocessor"] = info.registers_per_multiprocessor;
    result.append(entry);
  }
  return result;
}

py::dict host_compiler() {
  const HostCompiler found = find_host_compiler();
  py::dict result;
  result["command"] = found.command;
  result["version"] = found.version;
  result["flags"] = host_compile_flags();
  return result;
}

// The problem of self-checks, edge by edge.
py::dict self_check_problem() {
  using namespace check_problem;
  std::array<int64_t, num_edges> receivers{}, senders{};
  for (int64_t node = 0; node < num_receivers; ++node) {
    for (int32_t slot = row_ptr[node]; slot < row_ptr[node + 1]; ++slot) {
      receivers[edge[slot]] = node;
      senders[edge[slot]] = sender[slot];
    }
  }
  return py::dict(py::arg("receiver") = receivers, py::arg("sender") = senders,
                  py::arg("num_receivers") = num_receivers, py::arg("num_senders") = num_senders,
                  py::arg("batch_rows") = batch_rows, py::arg("projections") = projections);
}

py::array_t<double> self_check_numbers(uint32_t sequence, uint32_t count) {
  py::array_t<double> numbers(count);
  for (uint32_t n = 0; n < count; ++n) numbers.mutable_at(n) = check_problem::number(sequence, n);
  return numbers;
}

// The settings that Python has to know; eqaccel/settings.py says what they are.
void bind_settings(py::module_& m) {
  m.def("tune", &settings::tune);
  m.def("weight_bytes", &settings::weight_bytes);
  m.def("compile_limit", [] { return settings::compile_limit().count(); });
  m.def("cache_limit", &settings::cache_limit);
}

// The cache folder, for the command line and for what Python keeps there.
void bind_cache(py::module_& m) {
  m.def("cache_dir", &cache::folder);
  m.def("cache_problem", &cache::problem);
  m.def("cache_stats", [] {
    const cache::Stats stats = cache::stats();
    return py::dict(py::arg("hits") = stats.hits, py::arg("misses") = stats.misses);
  });
  m.def("cache_files", [] {
    py::list result;
    for (const cache::File& file : cache::files()) {
      result.append(py::dict(py::arg("name") = file.name, py::arg("bytes") = file.bytes, py::arg("used") = file.used,
                             py::arg("written") = file.written));
    }
    return result;
  });
  m.def(
      "read_cached",
      [](const std::string& name) {
        std::string problem;
        const std::optional<std::string> content = cache::read_bytes(name, problem);
        return py::make_tuple(content ? py::object(py::bytes(*content)) : py::none(), problem);
      },
      py::arg("name"));
  m.def(
      "write_cached",
      [](const std::string& name, const py::bytes& content) {
        std::string problem;
        cache::write_bytes(name, std::string(std::string_view(content)), problem);
        return problem;
      },
      py::arg("name"), py::arg("content"));
  m.def("remove_cached", &cache::remove, py::arg("name"));
  m.def("distrust_path", &distrust_path, py::arg("path"));
}

// eqaccel.errors is imported when an error comes, not before: the runtime does not depend on the package around it.
template <class... Arguments>
void raise(const char* type, const Arguments&... arguments) {
  const py::object instance = py::module_::import("eqaccel.errors").attr(type)(arguments...);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(instance.ptr())), instance.ptr());
}

// Calls a Python function with a message, from any thread.
std::function<void(const std::string&)> message_handler(py::function handler) {
  // The object is never released: it outlives the interpreter inside the runtime.
  PyObject* function = handler.release().ptr();
  return [function](const std::string& message) {
    py::gil_scoped_acquire acquire;
    try {
      py::reinterpret_borrow<py::function>(function)(message);
    } catch (py::error_already_set& error) {  // warnings turned into errors must not break a launch half-way
      error.discard_as_unraisable("eqaccel message handler");
    }
  };
}

// Calls a Python function that makes a payload, or None where there is none, from any thread.
std::function<std::string(const std::string&)> payload_maker(py::function maker) {
  PyObject* function = maker.release().ptr();  // as above
  return [function](const std::string& spec) -> std::string {
    py::gil_scoped_acquire acquire;
    try {
      const py::object made = py::reinterpret_borrow<py::function>(function)(spec);
      return made.is_none() ? "" : made.cast<std::string>();
    } catch (const py::error_already_set& error) {  // which must not leave this scope: callers have no interpreter lock
      throw std::runtime_error(error.what());
    }
  };
}

// Whether Ctrl-C was pressed. Python's handler only notes it down, for the main thread to act upon between two of its
// instructions. The note is put back: if it is not this library that raises KeyboardInterrupt, Python does afterwards.
bool interrupt_noted() {
  if (syscall(SYS_gettid) != getpid()) return false;  // without waiting for the interpreter lock
  py::gil_scoped_acquire acquire;
  if (!PyOS_InterruptOccurred()) return false;
  PyErr_SetInterrupt();
  return true;
}

}  // namespace

PYBIND11_MODULE(_runtime, m) {
  m.doc() = "The compiled part of eqaccel.runtime: compile, cache, launch.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const MissingCompilerError& error) {
      raise("MissingCompilerError", error.what(), error.log);
    } catch (const SharedMemoryError& error) {
      raise("SharedMemoryError", error.what(), error.log);
    } catch (const InterruptedError& error) {
      if (PyErr_CheckSignals() == 0) raise("CompileError", error.what(), error.log);
    } catch (const CompileError& error) {
      raise("CompileError", error.what(), error.log);
    } catch (const SettingsError& error) {
      raise("SettingsError", error.what());
    }
  });

  py::class_<Program, std::shared_ptr<Program>>(m, "Program", "The kernels of one computation, read from a payload.")
      .def(py::init([](const py::bytes& payload) {
             const std::string_view text = payload;
             return std::make_shared<Program>(bytes_of(text), text.size());
           }),
           py::arg("payload"))
      .def(
          "source",
          [](const Program& self, const std::string& backend, const std::string& scalar, const std::string& direction,
             const std::optional<std::string>& arch) {
            return self.source(parse_backend(backend), parse_scalar(scalar), parse_direction(direction),
                               arch.value_or(""));
          },
          py::arg("backend"), py::arg("scalar"), py::arg("direction"), py::arg("arch") = py::none())
      .def(
          "body",
          [](const Program& self, const std::string& backend, const std::string& scalar, const std::string& direction,
             const std::optional<std::string>& arch) {
            return self.body(parse_backend(backend), parse_scalar(scalar), parse_direction(direction),
                             arch.value_or(""));
          },
          py::arg("backend"), py::arg("scalar"), py::arg("direction"), py::arg("arch") = py::none())
      .def("number", &Program::number, py::arg("key"))
      .def_property_readonly("family", [](const Program& self) { return self.family().name; })
      .def(
          "compile_arch",
          [](const Program& self, const std::string& backend, const std::string& scalar, const std::string& direction,
             const std::optional<std::string>& arch) {
            return self.family().compile_arch(self, parse_backend(backend), parse_scalar(scalar),
                                              parse_direction(direction), arch.value_or(""));
          },
          py::arg("backend"), py::arg("scalar"), py::arg("direction"), py::arg("arch") = py::none())
      .def(
          "load",
          [](const Program& self, const std::string& backend, const std::string& scalar, const std::string& direction,
             int device) {
            self.load(parse_backend(backend), parse_scalar(scalar), parse_direction(direction), device);
          },
          py::arg("backend"), py::arg("scalar"), py::arg("direction"), py::arg("device"),
          py::call_guard<py::gil_scoped_release>())
      .def("compile", &compile, py::arg("backend"), py::arg("scalar"), py::arg("direction"),
           py::arg("arch") = py::none())
      .def(
          "compile_for",
          [](const Program& self, const std::string& target, const std::string& scalar, const std::string& direction,
             const std::string& source) {
            std::string log, code;
            {
              py::gil_scoped_release release;
              code = self.compile_for(target, parse_scalar(scalar), parse_direction(direction), source, log);
            }
            return py::make_tuple(py::bytes(code), log);
          },
          py::arg("target"), py::arg("scalar"), py::arg("direction"), py::arg("source"))
      .def("launch", &launch, py::arg("backend"), py::arg("scalar"), py::arg("direction"), py::arg("operands"),
           py::arg("device") = 0, py::arg("stream") = 0)
      .def("workspace_bytes", &workspace_bytes, py::arg("backend"), py::arg("scalar"), py::arg("direction"),
           py::arg("operands"), py::arg("device") = -1);

  m.def(
      "register_program",
      [](int64_t key, const py::bytes& payload) {
        const std::string_view text = payload;
        return register_program(key, bytes_of(text), text.size());
      },
      py::arg("key"), py::arg("payload"));
  m.def("find_program", &find_program, py::arg("key"));
  m.def("third_program", py::overload_cast<int64_t>(&third_program), py::arg("key"),
        py::call_guard<py::gil_scoped_release>());
  m.def("set_third_maker", [](py::function f) { set_third_maker(payload_maker(std::move(f))); });
  m.def(
      "translation_unit",
      [](const std::string& scalar, const std::string& direction, const std::string& prelude, const std::string& body) {
        return translation_unit(parse_scalar(scalar), parse_direction(direction), prelude, body);
      },
      py::arg("scalar"), py::arg("direction"), py::arg("prelude"), py::arg("body"));
  for (const auto& [backend, suffix] : {std::pair(Backend::cuda, "cuda"), std::pair(Backend::hip, "hip")}) {
    m.def((std::string("compile_") + suffix).c_str(),
          [backend = backend](const std::string& source, const std::string& arch) {
            return compile_source(backend, source, arch);
          },
          py::arg("source"), py::arg("arch"));
    m.def((std::string(suffix) + "_devices").c_str(), [backend = backend] { return devices(backend); });
  }
  m.def(
      "compile_cpu",
      [](const std::string& source, const std::string& target) {
        std::string log, code;
        {
          py::gil_scoped_release release;
          code = compile_host(find_host_compiler(), source, log, target);
        }
        return py::make_tuple(py::bytes(code), log);
      },
      py::arg("source"), py::arg("target"));
  m.def("nvrtc_version", [] { return gpu_compiler_version(Backend::cuda); });
  m.def("hiprtc_version", [] { return gpu_compiler_version(Backend::hip); });
  m.def("find_nvrtc", &find_nvrtc, py::arg("folders"));
  m.def("set_package_folders", &set_package_folders, py::arg("folders"));
  m.def("resources", &read_resources, py::arg("log"));
  m.def("host_compiler", &host_compiler);
  m.def("cpu_targets", [] { return usable_targets(Backend::cpu, ""); });
  m.def("instruction_sets", &instruction_sets);
  m.def("self_check_problem", &self_check_problem);
  m.def("self_check_numbers", &self_check_numbers, py::arg("sequence"), py::arg("count"));
  bind_settings(m);
  bind_cache(m);
  m.def("set_warning_handler", [](py::function f) { set_warning_handler(message_handler(std::move(f))); });
  m.def("set_progress_handler", [](py::function f) { set_progress_handler(message_handler(std::move(f))); });
  m.def("end_compilers", &end_processes);
  set_interrupt_check(interrupt_noted);
}
