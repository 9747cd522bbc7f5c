#include "metadata.h"

#include <stdexcept>

#include "json.h"

namespace eqaccel {
namespace {

constexpr int64_t format = 2;

// Wider rows than any model has: what is larger is no width, and would overflow where bytes are counted.
constexpr int64_t max_width = 1 << 24;

std::vector<std::string> read_names(const Json& json) {
  std::vector<std::string> names;
  for (const Json& name : json.list()) names.push_back(name.string());
  if (names.empty()) throw std::runtime_error("has no names of types of atoms");
  return names;
}

std::vector<int64_t> read_widths(const Json& json) {
  std::vector<int64_t> widths;
  for (const Json& width : json.list()) widths.push_back(width.whole(1, max_width));
  return widths;
}

}  // namespace

Metadata read_metadata(const std::string& text) {
  const Json json = Json::parse(text);
  if (const int64_t found = json["format"].whole(1, 1000000); found != format) {
    throw std::runtime_error(
        "has format " + std::to_string(found) + ", and this eqaccel reads " + std::to_string(format) + ": " +
        (found > format ? "update eqaccel, or export the model with this one" : "export the model again"));
  }
  if (const std::string& kind = json["kind"].string(); kind != "torchscript")
    throw std::runtime_error("is of kind '" + kind + "': export it as TorchScript");
  const std::string& energy = json["units"]["energy"].string();
  const std::string& length = json["units"]["length"].string();
  if (energy != "eV" || length != "angstrom")
    throw std::runtime_error("is in " + energy + " and " + length + ", expected eV and angstrom");
  const std::string& dtype = json["dtype"].string();
  if (dtype != "float64" && dtype != "float32") throw std::runtime_error("has dtype '" + dtype + "'");

  Metadata metadata;
  metadata.info.cutoff = json["cutoff"].number();
  if (!(metadata.info.cutoff > 0)) throw std::runtime_error("has no positive cutoff");
  metadata.info.type_names = read_names(json["type_names"]);
  metadata.info.exchange_widths = read_widths(json["exchange_widths"]);
  metadata.info.is_double = dtype == "float64";
  metadata.is_precompiled = !json["precompiled"].list().empty();
  return metadata;
}

}  // namespace eqaccel
