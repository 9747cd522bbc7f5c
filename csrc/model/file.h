// The bytes of an exported file, before anything in them is believed.
#pragma once
#include <string>

namespace eqaccel {

// Reads a file and compares it with the SHA-256 that it ends with. Throws std::runtime_error, a sentence about the file
// without its subject, if it can not be read, is no exported file, or is not as it was written. The digest tells of
// damage, not of who made the file.
std::string read_exported(const std::string& path);

// Whether kernels in machine code are among the bytes of a file.
bool holds_native_code(const std::string& content);

}  // namespace eqaccel
