// The description that an exported file holds of itself.
#pragma once
#include <string>

#include "model.h"

namespace eqaccel {

struct Metadata {
  ModelInfo info;            // without the device, which the caller of the model chooses
  bool is_precompiled = false;  // whether kernels in machine code are in the file
};

// Reads the JSON text. Throws std::runtime_error, a sentence about the file without its subject, if it is no
// description, or one of a model that this version can not run.
Metadata read_metadata(const std::string& text);

}  // namespace eqaccel
