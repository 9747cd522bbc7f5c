// The check of a CPU kernel that has just been compiled: compilers have faults, and a wrong kernel must not be used.
#pragma once
#include <string>

#include "kernel.h"

namespace eqaccel {

// Runs a kernel on the problem that eqaccel/codegen/check.py describes, in both layouts, and compares projections of
// its outputs with the payload's `figures` for that direction. Returns a line for each block that differs.
std::string self_check(const Kernel&, Scalar, Direction, const std::string& blocks, const std::string& figures);

}  // namespace eqaccel
