#include "host_compiler.h"

#include <chrono>
#include <fstream>
#include <functional>
#include <mutex>
#include <sstream>

#include "cache.h"
#include "diagnostics.h"
#include "process.h"
#include "settings.h"
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

constexpr std::chrono::minutes version_limit{1};
constexpr double first_notice = 4, later_notices = 10;  // seconds

// Into how many translation units a source can be cut: EQ_UNIT, from 0 on, says which one of them is wanted.
int units_of(const std::string& source) {
  constexpr char definition[] = "\n#define EQ_UNITS ";
  const std::size_t found = source.find(definition);
  return found == std::string::npos ? 1 : std::stoi(source.substr(found + sizeof definition - 1));
}

// Tells what takes longer than some seconds, and that it goes on.
std::function<void(double)> progress_of(const std::string& what) {
  return [what, next = first_notice](double seconds) mutable {
    if (seconds < next) return;
    next += later_notices;
    tell_progress("compiling " + what + " for the CPU: " + std::to_string(int(seconds)) + " s so far");
  };
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
    ProcessResult result{-1, ""};
    try {
      result = run_processes({{ask, scratch.path() + "/version"}}, {version_limit}).front();
    } catch (const TimedOut&) {
      result.output = "no answer within a minute";
    } catch (const Interrupted&) {
      throw InterruptedError("'" + join(ask) + "' was interrupted", "");
    }
    version = result.output.substr(0, result.output.find('\n'));
    if (result.status != 0 || version.empty()) {
      version.clear();
      throw MissingCompilerError("'" + join(ask) +
                                     "' failed, so it can not be used as the host C++ compiler: install "
                                     "g++ 9 or newer or clang++ 10 or newer, or point EQACCEL_CXX to one",
                                 result.output);
    }
  }
  return version;
}

// ld.bfd takes 50 ms for a kernel, a fifth of what most of them take in all, as it reads every symbol of libstdc++; gold
// takes 17. Where it lies beside the compiler it is of the same installation, and nobody has to be asked. The compiler
// that a launcher starts may be anywhere.
std::vector<std::string> linker_flags(const HostCompiler& compiler) {
  const std::string& path = compiler.command[0];
  const std::string gold = path.substr(0, path.find_last_of('/') + 1) + "ld.gold";
  if (compiler.command.size() > 1 || find_executable(gold).empty()) return {};
  return {"-fuse-ld=gold"};
}

}  // namespace

HostCompiler find_host_compiler() {
  // A variable that names a compiler is an order: if it can not be followed, silently using another would mislead.
  for (const char* variable : {"EQACCEL_CXX", "CXX"}) {
    std::vector<std::string> command = split(environment(variable));
    if (command.empty()) continue;
    const std::string path = find_executable(command[0]);
    if (path.empty()) {
      throw MissingCompilerError(std::string(variable) + " names '" + command[0] +
                                     "', which is not an executable: set " +
                                     "it to a C++ compiler (g++ 9 or newer, clang++ 10 or newer) or unset it",
                                 "");
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
                             "with precompile=[...] for the CPUs that it will run on",
                             "");
}

std::vector<std::string> host_compile_flags(const std::string& target) {
  std::vector<std::string> flags{"-std=c++17", "-O2"};
  for (const std::string& flag : cpu_target_flags(target)) flags.push_back(flag);
  for (const char* flag :
       {"-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden", "-w"})
    flags.push_back(flag);
  return flags;
}

std::string compile_host(const HostCompiler& compiler, const std::string& source, std::string& log,
                         const std::string& target, const std::string& what) {
  cache::Scratch scratch;
  const auto file = [&](const std::string& name) { return scratch.path() + "/" + name; };
  cache::write_file(file("kernel.cpp"), source);
  std::vector<std::string> base = compiler.command;
  for (const std::string& flag : host_compile_flags(target)) base.push_back(flag);
  const auto command = [&](const std::vector<std::string>& more, const std::string& name) {
    std::vector<std::string> words = base;
    words.insert(words.end(), more.begin(), more.end());
    return Command{words, file(name + ".log")};
  };

  // Units are compiled side by side and linked; a single one in one go.
  const int units = units_of(source);
  std::vector<std::vector<Command>> steps(1);
  std::vector<std::string> link = linker_flags(compiler);
  link.insert(link.end(), {"-o", file("kernel.so")});
  if (units == 1) {
    link.push_back(file("kernel.cpp"));
  } else {
    for (int unit = 0; unit < units; ++unit) {
      const std::string number = std::to_string(unit), object = file("unit" + number + ".o");
      steps[0].push_back(command({"-c", "-DEQ_UNIT=" + number, "-o", object, file("kernel.cpp")}, "unit" + number));
      link.push_back(object);
    }
    steps.emplace_back();
  }
  steps.back().push_back(command(link, "kernel"));

  const Waiting waiting{settings::compile_limit(), progress_of(what)};
  std::string said;
  try {
    for (const std::vector<Command>& step : steps) {
      const std::vector<ProcessResult> results = run_processes(step, waiting);
      for (std::size_t n = 0; n < step.size(); ++n) {
        said += "$ " + join(step[n].words) + "\n" + results[n].output;
        if (results[n].status == 0) continue;
        throw CompileError("the host compiler failed (exit status " + std::to_string(results[n].status) + ") on " +
                               what + " for the CPU." + first_error(results[n].output) +
                               " Set EQACCEL_DUMP to a folder to keep the source.",
                           said);
      }
    }
  } catch (const TimedOut&) {
    throw CompileError("the host compiler was ended after " + std::to_string(int(waiting.limit.count())) +
                           " seconds on " + what +
                           " for the CPU. Set EQACCEL_COMPILE_LIMIT to more seconds if the machine is slow, or "
                           "EQACCEL_CXX to another compiler if this one hangs.",
                       said + "$ " + join(base) + " ...\n");
  } catch (const Interrupted&) {
    throw InterruptedError("the compilation of " + what + " for the CPU was interrupted", said);
  }
  if (!std::ifstream(file("kernel.so"))) {
    throw CompileError("the host compiler made no file of " + what +
                           " for the CPU, and reported no fault. Set "
                           "EQACCEL_DUMP to a folder to keep the source.",
                       said);
  }
  log = said;
  return cache::read_file(file("kernel.so"));
}

}  // namespace eqaccel
