// Settings that are a yes or a no. Python reads the environment too, and asks here what a text means.
#pragma once
#include <optional>
#include <string>

namespace eqaccel {

// 1, true, yes, on; or 0, false, no, off and the empty text, in any case and between blanks. Nothing for other texts.
std::optional<bool> parse_flag(std::string text);

}  // namespace eqaccel
