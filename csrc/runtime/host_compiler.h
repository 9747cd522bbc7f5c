// The host C++ compiler, which makes the CPU kernels.
#pragma once
#include <string>
#include <vector>

#include "program.h"

namespace eqaccel {

struct HostCompiler {
  std::vector<std::string> command;  // the compiler and any leading arguments ("ccache", "g++")
  std::string version;               // first line of --version
};

// Looks at EQACCEL_CXX, then CXX, then for g++, clang++ and c++ on PATH. Throws MissingCompilerError.
HostCompiler find_host_compiler();
// Flags of every CPU kernel, for this machine or for a target of targets.h.
std::vector<std::string> host_compile_flags(const std::string& target = "");
// Compiles a source to a shared library; returns its bytes and sets `log`. One with a line "#define EQ_UNITS <n>" is
// compiled as n translation units side by side, each with EQ_UNIT defined as its number. `what` is for errors and for
// those who are told that it takes long. Throws CompileError, InterruptedError if somebody ended it (Ctrl-C), and
// CompileError too if a compiler has not ended after EQACCEL_COMPILE_LIMIT seconds.
std::string compile_host(const HostCompiler&, const std::string& source, std::string& log,
                         const std::string& target = "", const std::string& what = "a kernel");

}  // namespace eqaccel
