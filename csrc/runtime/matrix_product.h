// Plain matrix products in float32 on tensor cores; the preludes in eqaccel/families/matrix_product say how.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpu_driver.h"
#include "program.h"

namespace eqaccel {

// C = A B: A is (rows, terms) and C is (rows, columns), both contiguous; strides of B are in elements. Or, where `summands`
// are given, (rows, 2) of them, row r of C is the sum of the rows summands[r] of A, times B: the second is -1 for none, and
// -2 where C is zero (if B is finite).
struct Matrices {
  const float *a, *b;
  float* c;
  int64_t rows, columns, terms;
  int64_t b_row_stride, b_column_stride;
  const int32_t* summands = nullptr;
};

class MatrixProduct {
 public:
  // Loaded at the first call for a program, a device and an architecture that `compile_arch` gives for it, then kept;
  // thread-safe.
  static const MatrixProduct& get(const Program&, int device, const std::string& arch);

  // What to compile the kernel for so that devices of `arch` run it; nothing where torch's product is faster. Where a
  // setting makes a device count as a smaller one, that is the kernel of smaller ones.
  static std::optional<std::string> compile_arch(const Program&, const std::string& arch);
  // The products of half precision that make one in float32: three with its accuracy, or one. Throws
  // std::invalid_argument for programs of older files.
  static int64_t products(const Program&);
  // Whether what is compiled for an architecture adds rows of A while it multiplies. If not, it takes no `summands`.
  static bool adds_rows(const Program&, const std::string& arch);
  // Whether a kernel takes operands of these sizes, at these addresses: it moves 16 bytes of A at a time, and 8 of C.
  static bool takes(const Matrices&);

  std::size_t workspace_bytes(const Matrices&) const;
  // Queues the work on `stream`.
  void launch(const Matrices&, void* workspace, void* stream) const;

 private:
  // How a kernel divides C: what a block makes of it at a time, and up to how many terms of rows of A it keeps for several
  // tiles of columns (none if 0); whether it adds rows of A.
  struct Tiling {
    int64_t width = 0, height = 0, kept_terms = 0;
    bool adds_rows = false;
    unsigned shared_bytes = 0;
    GpuDriver::Function kernel = nullptr;
    int64_t slots = 0;  // blocks that the device holds at a time
  };

  MatrixProduct(const Program&, int device, const std::string& arch);
  const Tiling& tiling(const Matrices&) const;
  int64_t shares_across(const Tiling&, const Matrices&) const;
  static int64_t padded_columns(const Tiling&, const Matrices&);

  const GpuDriver& driver_;
  int device_;
  bool launches_early_;
  int64_t parts_;      // numbers that a factor becomes
  int64_t depth_ = 0;  // terms that are read together
  unsigned threads_ = 0;
  GpuDriver::Function pack_ = nullptr;
  std::vector<Tiling> tilings_;
};

}  // namespace eqaccel
