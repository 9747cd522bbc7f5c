// What the operators that launch kernels have in common.
#pragma once
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <list>
#include <memory>

#include "device.h"
#include "host_memory.h"
#include "kernel.h"
#include "operators.h"

namespace eqaccel::ops {

// One call of an operator: checks operands against the program and keeps alive what the kernel reads.
class KernelCall {
 public:
  KernelCall(const char* op, const Tensor& payload, int64_t key, const Tensor& x)
      : op_(op), like_(x), guard_(x.device()), program_(program_of(op, payload, key)) {
    TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble, op,
                ": argument 'x' must be float32 "
                "or float64, got ",
                x.scalar_type(), ". Convert all operands with .float() or .double().");
    ops_.threads = at::get_num_threads();
  }

  Tensor new_rows(int64_t count, const char* dim) const {
    return empty_kept({count, program_->number(dim)}, like_.options());
  }

  eq_operands& operands() { return ops_; }

 protected:
  void check_kind(const char* name, const Tensor& t) const {
    TORCH_CHECK(t.device() == like_.device() && t.scalar_type() == like_.scalar_type(), op_, ": argument '", name,
                "' must be ", like_.scalar_type(), " on ", like_.device(), ", like 'x', got ", t.scalar_type(), " on ",
                t.device(), ". Convert it with .to(x).");
  }

  // The elements of a tensor without gaps, which stay until the call is over.
  const void* held(const Tensor& t) {
    constexpr uintptr_t widest = 16;  // bytes that a GPU thread reads at a time
    const Tensor& kept = held_.emplace_back(t.contiguous());
    if (reinterpret_cast<uintptr_t>(kept.const_data_ptr()) % widest != 0) held_.emplace_back(kept.clone());
    return held_.back().const_data_ptr();
  }

  // `shared`: where edges share rows of weights, see Kernel::launch_shared.
  void run(Direction direction, const int32_t* shared = nullptr) {
    translating_errors([&] {
      const Kernel& kernel = this->kernel(direction);
      const Tensor workspace = workspace_of(kernel.workspace_bytes(ops_));
      void* const stream = current_stream(like_.device());
      if (shared) kernel.launch_shared(ops_, shared, stream);
      else kernel.launch(ops_, stream);
    });
  }

  const Kernel& kernel(Direction direction) const {
    const int device = std::max<int>(like_.device().index(), 0);
    return program_->kernel(backend_of(like_.device()), scalar_of(like_.scalar_type()), direction, device);
  }
  // Scratch of the operands, to be held until the work is queued.
  Tensor workspace_of(std::size_t bytes) {
    const Tensor workspace = empty_kept({static_cast<int64_t>(bytes)}, like_.options().dtype(at::kByte));
    ops_.workspace = workspace.mutable_data_ptr();
    return workspace;
  }

  const char* op_;
  Tensor like_;
  c10::OptionalDeviceGuard guard_;
  std::shared_ptr<Program> program_;
  std::list<Tensor> held_;
  eq_operands ops_{};
};

}  // namespace eqaccel::ops
