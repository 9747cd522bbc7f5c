// The process-wide map from a module's integer key to its program.
#include <unordered_map>

#include "payload.h"
#include "program.h"

namespace eqaccel {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Program>> programs;
};

// Leaked on purpose: torch may still launch from another thread while static objects are taken down.
Registry& registry() {
  static auto* value = new Registry;
  return *value;
}

}  // namespace

std::shared_ptr<Program> find_program(int64_t key) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().programs.find(key);
  return found == registry().programs.end() ? nullptr : found->second;
}

std::shared_ptr<Program> register_program(int64_t key, const uint8_t* payload, std::size_t size) {
  if (auto known = find_program(key)) return known;
  if (payload_key(std::string(reinterpret_cast<const char*>(payload), size)) != key) {
    throw bad_payload("the bytes that key " + std::to_string(key) + " was made of", "others: they were damaged, or "
                                                                                    "changed without a new key");
  }
  auto program = std::make_shared<Program>(payload, size);  // outside the lock; if two threads do this, one is dropped
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().programs.emplace(key, std::move(program)).first->second;
}

}  // namespace eqaccel
