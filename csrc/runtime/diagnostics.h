// Warnings, what compilers complain about, and the files that EQACCEL_DUMP asks for.
#pragma once
#include <functional>
#include <string>

#include "program.h"

namespace eqaccel {

// Where warnings go; the default prints them to std::cerr.
void set_warning_handler(std::function<void(const std::string&)>);
// Each distinct `topic` warns once in the life of the process.
void warn_once(const std::string& topic, const std::string& message);

// Where news of work that takes long go; by default nowhere.
void set_progress_handler(std::function<void(const std::string&)>);
void tell_progress(const std::string& message);

// The first error in what a compiler printed, as the sentence that a message continues with; "" if none is seen.
std::string first_error(const std::string& log);

struct Dumped {
  std::string source, log, plan;
};
// Writes plan (if there is one), source, compile log and resource use into the folder EQACCEL_DUMP, if set, under
// <backend>-<direction>-<scalar>-<start of the cache key>.
void dump(Backend, Scalar, Direction, const std::string& key, const Dumped&);

}  // namespace eqaccel
