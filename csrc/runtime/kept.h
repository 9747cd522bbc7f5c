// What is loaded once for a key and then kept.
#pragma once
#include <map>
#include <memory>
#include <mutex>

namespace eqaccel {

// The thing of a key, which `make` makes at the first call, as a unique pointer; thread-safe for each kind of `make`.
template <class Key, class Make>
auto& kept(const Key& key, const Make& make) {
  // Leaked on purpose, like the programs: torch may launch while static objects are taken down.
  static auto* const mutex = new std::mutex;
  static auto* const things = new std::map<Key, decltype(make())>;
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& found = (*things)[key];
  if (!found) found = make();
  return *found;
}

}  // namespace eqaccel
