#include "settings.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>

namespace eqaccel {
namespace {

SettingsError error(const char* name, const std::string& expected, const std::string& got) {
  return SettingsError("environment variable " + std::string(name) + ": expected " + expected + ", got '" + got + "'");
}

// 1, true, yes, on; or 0, false, no, off and the empty text, in any case and between blanks.
bool flag(const char* name) {
  const std::string value = environment(name);
  std::string text = value;
  const auto blank = [](unsigned char c) { return std::isspace(c) != 0; };
  text.erase(std::find_if_not(text.rbegin(), text.rend(), blank).base(), text.end());
  text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), blank));
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  if (text.empty() || text == "0" || text == "false" || text == "no" || text == "off") return false;
  if (text == "1" || text == "true" || text == "yes" || text == "on") return true;
  throw error(name, "1 or 0", value);
}

// A whole number between two, or nothing if the variable is unset.
std::optional<int64_t> whole_number(const char* name, int64_t least, int64_t most, const std::string& expected) {
  const std::string value = environment(name);
  if (value.empty()) return {};
  int64_t number = 0;
  const char* const last = value.data() + value.size();
  const auto [end, problem] = std::from_chars(value.data(), last, number);
  if (problem != std::errc() || end != last || number < least || number > most) throw error(name, expected, value);
  return number;
}

}  // namespace

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

namespace settings {

std::string cache_dir() { return environment("EQACCEL_CACHE_DIR"); }

int64_t cache_limit() {
  constexpr int64_t usual = 2048, most = 999'999'999;
  return whole_number("EQACCEL_CACHE_LIMIT", 0, most, "a whole number of MiB (0 for no limit)").value_or(usual) << 20;
}

bool check_indices() { return flag("EQACCEL_CHECK_INDICES"); }

std::chrono::duration<double> compile_limit() {
  const std::string text = environment("EQACCEL_COMPILE_LIMIT");
  if (text.empty()) return std::chrono::minutes(10);
  char* end = nullptr;
  const double seconds = std::strtod(text.c_str(), &end);
  if (*end != '\0' || !(seconds > 0)) throw error("EQACCEL_COMPILE_LIMIT", "seconds > 0", text);
  return std::chrono::duration<double>(seconds);
}

std::string dump() { return environment("EQACCEL_DUMP"); }

std::string nvrtc() { return environment("EQACCEL_NVRTC"); }

int64_t shared_bytes() {
  const std::optional<int64_t> kib = whole_number("EQACCEL_SHARED_KIB", 1, 1024, "a whole number from 1 to 1024");
  return kib ? *kib * 1024 : std::numeric_limits<int64_t>::max();
}

bool tune() { return flag("EQACCEL_TUNE"); }

int64_t weight_bytes() {
  constexpr int64_t most = 999'999'999;
  return whole_number("EQACCEL_WEIGHT_MIB", 1, most, "a whole number of MiB, at least 1").value_or(0) << 20;
}

}  // namespace settings
}  // namespace eqaccel
