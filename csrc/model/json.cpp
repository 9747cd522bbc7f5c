#include "json.h"

#include <cstdlib>
#include <stdexcept>

namespace eqaccel {

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json document() {
    Json json = value("");
    if (peek() != 0) fail("something follows the end");
    return json;
  }

 private:
  Json value(const std::string& place) {
    Json json;
    json.place_ = place;
    const char first = peek();
    if (first == '{') {
      json.kind_ = Json::Kind::object;
      sequence('}', [&](size_t) {
        if (peek() != '"') fail("expected a key");
        const std::string key = string();
        take(':');
        json.object_[key] = value(place.empty() ? key : place + "." + key);
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
      const char* begin = text_.c_str() + at_;
      char* end = nullptr;
      json.number_ = std::strtod(begin, &end);
      if (end == begin) fail("expected a value");
      at_ += static_cast<size_t>(end - begin);
    }
    return json;
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
