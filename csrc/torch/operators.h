// What all operators share: calls through torch's dispatcher, and the programs that they run.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <memory>

#include "program.h"
#include "settings.h"

namespace eqaccel::ops {

using at::Tensor;

// An operator as autograd, tracing and vmap see it.
template <class Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// What an operator gives for operands without data: a tensor of these sizes, of the type of an operand, on "meta" too.
inline Tensor stand_in(c10::SymIntArrayRef sizes, const Tensor& like) {
  TORCH_CHECK(like.is_meta(), "eqaccel::operator: expected all operands on the device 'meta', or none, got one on ",
              like.device(),
              ". What was on 'meta' has no kernels: make the module, or patch the model, when its weights are there.");
  return at::empty_symint(sizes, like.options());
}
inline Tensor stand_in(const Tensor& t) { return stand_in(t.sym_sizes(), t); }

// Under autocast products and polynomials run in float32: sums over many edges do not fit 16-bit types. float64 stays
// float64. `device_of` is an operand of the same call.
Tensor cast_to_float32(const Tensor&, const Tensor& device_of);

// The program of a key, for the operator `op`. The payload is read, and copied from the GPU, only the first time a
// process sees the key.
std::shared_ptr<Program> program_of(const char* op, const Tensor& payload, int64_t key);

// torch passes on the text alone, so that has to hold the kind and the log; Python takes it apart again (library.py).
[[noreturn]] void rethrow(const CompileError&);
[[noreturn]] void rethrow(const SettingsError&);

// Does work that compiles, loads or launches kernels, with errors in the form that Python takes apart.
template <class Work>
auto translating_errors(const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const CompileError& error) {
    rethrow(error);
  } catch (const SettingsError& error) {
    rethrow(error);
  }
}

// What kernels call the type of a float32 or float64 tensor.
inline Scalar scalar_of(at::ScalarType type) { return type == at::kFloat ? Scalar::float32 : Scalar::float64; }

}  // namespace eqaccel::ops
