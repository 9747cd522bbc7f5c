// Functions of a library that is opened at run time.
#pragma once
#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace eqaccel {

// The first of `names` that can be opened, null if none; a library that is loaded already goes before all others, so
// that the process keeps to the one torch uses.
inline void* open_first(const std::vector<std::string>& names) {
  for (int only_loaded : {RTLD_NOLOAD, 0}) {
    for (const std::string& name : names) {
      if (name.empty()) continue;
      if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | only_loaded)) return library;
    }
  }
  return nullptr;
}

template <typename Function>
void find_function(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("a GPU library is too old: it has no function ") + name);
}

}  // namespace eqaccel
