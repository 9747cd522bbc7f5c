#include "operators.h"

#include <ATen/autocast_mode.h>

namespace eqaccel::ops {

Tensor cast_to_float32(const Tensor& t, const Tensor& device_of) {
  return at::autocast::cached_cast(at::kFloat, t, device_of.device().type());
}

std::shared_ptr<Program> program_of(const char* op, const Tensor& payload, int64_t key) {
  if (auto program = find_program(key)) return program;
  TORCH_CHECK(payload.scalar_type() == at::kByte && payload.numel() > 0, op,
              ": argument 'payload' must be the uint8 "
              "tensor that belongs to key ",
              key, ", got ", payload.scalar_type(), " of shape ", payload.sizes(),
              ". Pass the payload of the module that made the key.");
  const Tensor bytes = payload.cpu().contiguous();
  return register_program(key, bytes.const_data_ptr<uint8_t>(), static_cast<std::size_t>(bytes.numel()));
}

void rethrow(const CompileError& error) {
  const char* kind = dynamic_cast<const MissingCompilerError*>(&error) ? "MissingCompilerError"
                     : dynamic_cast<const SharedMemoryError*>(&error)  ? "SharedMemoryError"
                                                                       : "CompileError";
  C10_THROW_ERROR(Error, c10::str("eqaccel::", kind, ": ", error.what(), "\nCompiler output:\n", error.log));
}

void rethrow(const SettingsError& error) { C10_THROW_ERROR(Error, c10::str("eqaccel::SettingsError: ", error.what())); }

}  // namespace eqaccel::ops
