// The settings of eqaccel: environment variables. They are read at every call, so that a program may set them late.
// eqaccel/settings.py says for users what each of them means, and asks here what it is.
#pragma once
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace eqaccel {

// A variable that can not be understood; the message names it.
struct SettingsError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Any environment variable, "" if absent.
std::string environment(const char* name);

// A variable that is set to the empty text counts as unset. Those that are not texts throw SettingsError. EQACCEL_CXX
// is read where CXX is, by host_compiler.cpp.
namespace settings {

std::string cache_dir();                        // EQACCEL_CACHE_DIR, "" if unset
int64_t cache_limit();                          // EQACCEL_CACHE_LIMIT in bytes, 0: no limit
bool check_indices();                           // EQACCEL_CHECK_INDICES
std::chrono::duration<double> compile_limit();  // EQACCEL_COMPILE_LIMIT
std::string dump();                             // EQACCEL_DUMP, a folder, "" if unset
std::string nvrtc();                            // EQACCEL_NVRTC, "" if unset
// EQACCEL_SHARED_KIB in bytes: a GPU counts as one whose blocks may take no more, so that the kernels of smaller GPUs
// run on larger ones, with as many blocks at a time as there.
int64_t shared_bytes();
bool tune();             // EQACCEL_TUNE
int64_t weight_bytes();  // EQACCEL_WEIGHT_MIB in bytes, 0 if unset

}  // namespace settings
}  // namespace eqaccel
