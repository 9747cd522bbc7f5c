// Just enough JSON for the description inside a model file.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace eqaccel {

class Json {
 public:
  // Throws std::runtime_error, as all below do, with a message that names the place. Text of any kind may be given.
  static Json parse(const std::string& text);

  // The value of a key of an object.
  const Json& operator[](const std::string& key) const;
  double number() const;  // finite
  int64_t whole(int64_t least, int64_t most) const;
  const std::string& string() const;
  const std::vector<Json>& list() const;

 private:
  friend class JsonReader;
  enum class Kind { null, boolean, number, string, list, object };
  void expect(Kind kind, const char* what) const;

  Kind kind_ = Kind::null;
  std::string place_;  // "units.energy": where in the document this value stands
  double number_ = 0;
  std::string string_;
  std::vector<Json> list_;
  std::map<std::string, Json> object_;
};

}  // namespace eqaccel
