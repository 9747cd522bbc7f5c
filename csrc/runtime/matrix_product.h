// Plain matrix products in float32 on the tensor cores of compute capability 9.0; eqaccel/families/matrix_product/matrix_product.h says how.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu_driver.h"
#include "program.h"

namespace eqaccel {

// C = A B: A is (rows, terms) and C is (rows, columns), both contiguous; strides of B are in elements. Or, where `parts`
// are given, (rows, 2) of them, row r of C is the sum of the rows parts[r] of A, times B: the second is -1 for none, and
// -2 where C is zero (if B is finite).
struct Matrices {
  const float *a, *b;
  float* c;
  int64_t rows, columns, terms;
  int64_t b_row_stride, b_column_stride;
  const int32_t* parts = nullptr;
};

class MatrixProduct {
 public:
  // Loaded at the first call for a program and a device, which has to be of `device_arch`, then kept; thread-safe.
  static const MatrixProduct& get(const Program&, int device);

  // The architecture of the devices that the kernel runs on, and the one to compile it for.
  static constexpr const char *device_arch = "sm_90", *compile_arch = "sm_90a";
  // Whether the kernel takes operands of these sizes, at these addresses: it moves 16 bytes of A at a time, and 8 of C.
  static bool takes(const Matrices&);

  std::size_t workspace_bytes(const Matrices&) const;
  // Queues the work on `stream`.
  void launch(const Matrices&, void* workspace, void* stream) const;

 private:
  // How a kernel divides C: what a block makes of it at a time, and up to how many terms of B it keeps (none if 0);
  // whether it adds rows of A.
  struct Tiling {
    int64_t width = 0, height = 0, kept_terms = 0;
    bool adds_rows = false;
    unsigned shared_bytes = 0;
    GpuDriver::Function kernel = nullptr;
  };

  MatrixProduct(const Program&, int device);
  int64_t width(const Matrices&) const;
  int64_t blocks(const Tiling&, const Matrices&) const;
  int64_t cost(const Tiling&, const Matrices&) const;
  const Tiling& tiling(const Matrices&) const;
  int64_t packed_size(const Matrices&) const;

  const GpuDriver& driver_;
  int device_;
  int64_t depth_;  // terms that are read together
  unsigned threads_;
  int64_t multiprocessors_;
  bool launches_early_;
  GpuDriver::Function pack_ = nullptr;
  std::vector<Tiling> tilings_;
};

}  // namespace eqaccel
