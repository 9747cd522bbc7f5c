// Host memory of large results, kept for the next call.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

namespace eqaccel::ops {

// Like at::empty. Large tensors on the CPU take memory that an earlier result of about this size has given back: memory
// that comes fresh from the system has to be mapped and cleared page by page, which can take longer than the kernel
// that fills it. Up to 1 GiB is kept.
at::Tensor empty_kept(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace eqaccel::ops
