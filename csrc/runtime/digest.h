// SHA-256, for names of cache entries and for detecting damaged ones.
#pragma once
#include <string>

namespace eqaccel {

std::string sha256(const std::string& text);  // 64 hexadecimal digits

}  // namespace eqaccel
