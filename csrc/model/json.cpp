#include "json.h"

#include <charconv>
#include <cmath>
#include <stdexcept>

namespace eqaccel {
namespace {

// Deeper than any description, and far from the end of the stack.
constexpr int max_depth = 64;

}  // namespace

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json document() {
    Json json = value("");
    if (peek(); at_ < text_.size()) fail("something follows the end");
    return json;
  }

 private:
  Json value(const std::string& place) {
    if (++depth_ > max_depth) fail("values are nested too deep");
    Json json;
    json.place_ = place;
    const char first = peek();
    if (first == '{') {
      json.kind_ = Json::Kind::object;
      sequence('}', [&](size_t) {
        if (peek() != '"') fail("expected a key");
        const std::string key = string();
        take(':');
        if (!json.object_.emplace(key, value(place.empty() ? key : place + "." + key)).second)
          fail("the key '" + key + "' stands there twice");
      });
    } else if (first == '[') {
      json.kind_ = Json::Kind::list;
      sequence(']', [&](size_t index) { json.list_.push_back(value(place + "[" + std::to_string(index) + "]")); });
    } else if (first == '"') {
      json.kind_ = Json::Kind::string;
      json.string_ = string();
    } else if (word("true") || word("false")) {
      json.kind_ = Json::Kind::boolean;
    } else if (!word("null")) {
      json.kind_ = Json::Kind::number;
      json.number_ = number();
    }
    --depth_;
    return json;
  }

  // The decimal point is a point whatever the language of the program is, and "nan" is no number.
  double number() {
    double result = 0;
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), result);
    if (error != std::errc() || !std::isfinite(result)) fail("expected a value");
    at_ += static_cast<size_t>(end - begin);
    return result;
  }

  template <class Item>
  void sequence(char close, Item item) {
    ++at_;
    if (peek() == close) {
      ++at_;
      return;
    }
    for (size_t index = 0;; ++index) {
      item(index);
      if (peek() == close) break;
      take(',');
    }
    ++at_;
  }

  std::string string() {
    std::string result;
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] != '\\') {
        result += text_[at_];
        continue;
      }
      if (++at_ == text_.size()) break;
      switch (text_[at_]) {
        case 'n': result += '\n'; break;
        case 't': result += '\t'; break;
        case 'u': result += "\\u"; break;  // kept as written: no name that is compared holds one
        default: result += text_[at_];
      }
    }
    if (at_ >= text_.size()) fail("a string does not end");
    ++at_;
    return result;
  }

  bool word(const char* expected) {
    const std::string text(expected);
    if (text_.compare(at_, text.size(), text) != 0) return false;
    at_ += text.size();
    return true;
  }

  void take(char expected) {
    if (peek() != expected) fail(std::string("expected '") + expected + "'");
    ++at_;
  }

  char peek() {
    at_ = text_.find_first_not_of(" \t\r\n", at_);
    if (at_ == std::string::npos) at_ = text_.size();
    return at_ < text_.size() ? text_[at_] : 0;
  }

  [[noreturn]] void fail(const std::string& message) const {
    throw std::runtime_error("not valid JSON at character " + std::to_string(at_) + ": " + message);
  }

  const std::string& text_;
  size_t at_ = 0;
  int depth_ = 0;
};

Json Json::parse(const std::string& text) { return JsonReader(text).document(); }

const Json& Json::operator[](const std::string& key) const {
  expect(Kind::object, "an object");
  const auto found = object_.find(key);
  if (found == object_.end()) {
    throw std::runtime_error("'" + (place_.empty() ? key : place_ + "." + key) + "' is missing");
  }
  return found->second;
}

double Json::number() const {
  expect(Kind::number, "a number");
  return number_;
}

int64_t Json::whole(int64_t least, int64_t most) const {
  const double found = number();
  if (!(found >= static_cast<double>(least) && found <= static_cast<double>(most)) || found != std::floor(found)) {
    throw std::runtime_error("'" + place_ + "' is not a whole number from " + std::to_string(least) + " to " +
                             std::to_string(most));
  }
  return static_cast<int64_t>(found);
}

const std::string& Json::string() const {
  expect(Kind::string, "a string");
  return string_;
}

const std::vector<Json>& Json::list() const {
  expect(Kind::list, "a list");
  return list_;
}

void Json::expect(Kind kind, const char* what) const {
  if (kind_ != kind) throw std::runtime_error("'" + place_ + "' is not " + what);
}

}  // namespace eqaccel
