// Targets by name, for kernels that are compiled on one machine and travel inside a payload to another.
#pragma once
#include <string>
#include <vector>

#include "program.h"

namespace eqaccel {

// Compiler options that select a CPU target ("cpu-avx2"); "" is the machine that compiles. Throws std::invalid_argument
// for a target of another family of processors.
std::vector<std::string> cpu_target_flags(const std::string& target);

// Targets whose kernels run here, best first: by the instruction sets of this CPU, or for a GPU of architecture `arch`.
std::vector<std::string> usable_targets(Backend, const std::string& arch);

// Names all instruction sets of this CPU, by a digest: a kernel of another machine's cache may not run here.
std::string instruction_sets();

}  // namespace eqaccel
