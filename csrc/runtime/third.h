// Programs of third derivatives. Few models take these, and their kernels are long: so they have a payload of their own,
// which is made in Python, from what the payload of a model says that it computes, where somebody first asks for one.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "program.h"

namespace eqaccel {

// Makes such a payload from entry "spec" of another; "" where derivatives are composed of the other kernels instead.
void set_third_maker(std::function<std::string(const std::string& spec)>);

// The program of third derivatives that belongs to a known program. Null where there is none: where third derivatives are
// composed, in programs without Python, and for payloads that do not say what they compute. Thread-safe; the maker is
// called once for each key, and what it throws is passed on.
std::shared_ptr<Program> third_program(int64_t key);

// The same where it has a kernel that a device runs.
std::shared_ptr<Program> third_program(int64_t key, Backend, Scalar, int device);

}  // namespace eqaccel
