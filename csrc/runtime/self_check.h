// The check of a CPU kernel before it is first used: compilers have faults, and a wrong kernel must not be used.
#pragma once
#include <string>

#include "kernel.h"

namespace eqaccel {

// Elements of a row of each kind of operand.
struct RowSizes {
  int64_t x, y, z, w;
};

// Runs a kernel on the problem that eqaccel/codegen/check.py describes, in both layouts, and compares projections of
// its outputs with the payload's `checksums` for that direction. Returns a line for each block that differs. Throws
// std::invalid_argument if blocks or checksums are not those of such rows.
std::string self_check(const Kernel&, Scalar, Direction, const RowSizes&, const std::string& blocks,
                       const std::string& checksums);

}  // namespace eqaccel
