// Launches of the GPU kernels that preludes/gpu.h exports: layout changes around the main kernel, then the ordered sum
// of the per-edge gradients of x.
#include <algorithm>

#include "gpu_driver.h"
#include "kernel.h"

namespace eqaccel {
namespace {

constexpr int64_t max_grid = 2147483647;
constexpr unsigned copy_threads = 256;
constexpr unsigned collect_threads = 128;

// The scratch of a launch: offsets in bytes, each aligned for the widest access. What is absent has size zero.
struct Scratch {
  int64_t gx_edge, x, gz, a, z, gx, bytes;
};

class GpuKernel : public Kernel {
 public:
  GpuKernel(const Program& program, Backend backend, Scalar scalar, Direction direction, int device)
      : driver_(GpuDriver::get(backend)), direction_(direction), device_(device),
        scalar_bytes_(scalar == Scalar::float32 ? 4 : 8), x_dim_(program.number("x_dim")),
        z_dim_(program.number("z_dim")), covers_all_(program.number("covers_all")) {
    const std::string prefix = std::string("gpu/") + name(direction) + "/" + name(scalar);
    threads_ = static_cast<unsigned>(program.number(prefix + "/threads"));
    shared_bytes_ = static_cast<unsigned>(program.number(prefix + "/shared_bytes"));
    const DeviceInfo& info = driver_.device(device);
    if (static_cast<int>(shared_bytes_) > info.shared_bytes_per_block) {
      throw std::runtime_error(std::string("the ") + name(direction) + " kernel needs " + std::to_string(shared_bytes_) +
                               " bytes of shared memory and " + info.name + " offers " +
                               std::to_string(info.shared_bytes_per_block) +
                               ": split the tensor product into smaller ones, or run it in float32");
    }
    const Compiled compiled = program.compile(backend, scalar, direction, info.arch);
    const GpuDriver::Module module = driver_.load_module(compiled.code, device);
    main_ = driver_.get_function(module, "eq_main");
    relayout_ = driver_.get_function(module, "eq_relayout");
    collect_ = driver_.get_function(module, "eq_collect");
    const DeviceScope scope(driver_, device);
    driver_.set_shared_bytes(main_, static_cast<int>(shared_bytes_));
    blocks_ = int64_t(info.multiprocessors) *
              std::max(driver_.resident_blocks(main_, static_cast<int>(threads_), shared_bytes_), 1);
  }

  std::size_t workspace_bytes(const eq_operands& o) const override { return scratch(o).bytes; }

  void launch(const eq_operands& given, void* stream) const override {
    const DeviceScope scope(driver_, device_);
    const Scratch at = scratch(given);
    char* const base = static_cast<char*>(given.workspace);
    eq_operands o = given;
    o.workspace = base + at.gx_edge;
    if (given.mul_ir) {
      o.x = change_layout(given.x, base + at.x, given.num_senders, true, false, stream);
      if (direction_ != Direction::forward)
        o.gz = change_layout(given.gz, base + at.gz, given.num_receivers, false, false, stream);
      if (direction_ == Direction::double_backward)
        o.a = change_layout(given.a, base + at.a, given.num_senders, true, false, stream);
      if (direction_ != Direction::backward) o.z = base + at.z;
      if (at.gx != at.bytes) o.gx = base + at.gx;
    }
    const bool adds_gx = direction_ != Direction::forward && given.atomic && given.row_ptr;
    if (!given.row_ptr) o.atomic = 0;  // every row has one edge: there is nothing to add
    if (adds_gx) driver_.fill_zero(o.gx, given.num_senders * x_dim_ * scalar_bytes_, stream);
    if (!covers_all_) {  // no path writes some blocks
      if (direction_ != Direction::backward) driver_.fill_zero(o.z, given.num_receivers * z_dim_ * scalar_bytes_, stream);
      if (collects(given)) driver_.fill_zero(o.workspace, given.num_edges * x_dim_ * scalar_bytes_, stream);
      else if (direction_ != Direction::forward && !adds_gx)
        driver_.fill_zero(o.gx, given.num_senders * x_dim_ * scalar_bytes_, stream);
    }
    if (given.num_receivers > 0) {
      // A receiver of a graph has many edges; rows of a batch have one, so a block takes several. The backward keeps
      // nothing for a receiver: its blocks share the edges equally.
      int receivers = given.row_ptr ? 1 : static_cast<int>(std::clamp<int64_t>(given.num_receivers / (4 * blocks_), 1, 64));
      const int64_t blocks = direction_ == Direction::backward ? std::min(given.num_edges, blocks_)
                                                               : (given.num_receivers + receivers - 1) / receivers;
      void* parameters[] = {&o, &receivers};
      driver_.launch(main_, {grid(blocks)}, {threads_}, shared_bytes_, stream, parameters);
    }
    if (given.mul_ir && direction_ != Direction::backward)
      change_layout(o.z, static_cast<char*>(given.z), given.num_receivers, false, true, stream);
    if (direction_ == Direction::forward || given.num_senders == 0) return;
    if (collects(given)) {
      o.gx = given.gx;
      const unsigned columns = collect_threads * (scalar_bytes_ == 4 && x_dim_ % 4 == 0 ? 4 : x_dim_ % 2 == 0 ? 2 : 1);
      void* parameters[] = {&o};
      driver_.launch(collect_, {grid(given.num_senders), unsigned((x_dim_ + columns - 1) / columns)}, {collect_threads}, 0,
                     stream, parameters);
    } else if (given.mul_ir) {
      change_layout(o.gx, static_cast<char*>(given.gx), given.num_senders, true, true, stream);
    }
  }

 private:
  // Whether gradients of x are kept per edge first: in a graph, unless they are added atomically.
  bool collects(const eq_operands& o) const {
    return direction_ != Direction::forward && o.row_ptr && !o.atomic;
  }

  Scratch scratch(const eq_operands& o) const {
    int64_t used = 0;
    auto take = [&](bool needed, int64_t elements) {
      const int64_t offset = used;
      if (needed) used += (elements * scalar_bytes_ + 255) / 256 * 256;
      return offset;
    };
    const bool relayout = o.mul_ir, gradient = direction_ != Direction::forward;
    Scratch at{};
    at.gx_edge = take(collects(o), o.num_edges * x_dim_);
    at.x = take(relayout, o.num_senders * x_dim_);
    at.gz = take(relayout && gradient, o.num_receivers * z_dim_);
    at.a = take(relayout && direction_ == Direction::double_backward, o.num_senders * x_dim_);
    at.z = take(relayout && direction_ != Direction::backward, o.num_receivers * z_dim_);
    at.gx = take(relayout && gradient && !collects(o), o.num_senders * x_dim_);
    at.bytes = used;
    if (!(relayout && gradient && !collects(o))) at.gx = at.bytes;
    return at;
  }

  void* change_layout(const void* from, char* to, int64_t rows, bool is_x, bool to_mul_ir, void* stream) const {
    if (rows > 0) {
      void* target = to;
      int x_flag = is_x, mul_ir_flag = to_mul_ir;
      void* parameters[] = {&from, &target, &rows, &x_flag, &mul_ir_flag};
      driver_.launch(relayout_, {grid(rows)}, {copy_threads}, 0, stream, parameters);
    }
    return to;
  }

  static unsigned grid(int64_t blocks) { return static_cast<unsigned>(std::min(blocks, max_grid)); }

  const GpuDriver& driver_;
  Direction direction_;
  int device_;
  int64_t scalar_bytes_, x_dim_, z_dim_;
  int64_t blocks_ = 1;  // of the main kernel that the device holds at a time
  bool covers_all_;
  unsigned threads_ = 0, shared_bytes_ = 0;
  GpuDriver::Function main_ = nullptr, relayout_ = nullptr, collect_ = nullptr;
};

}  // namespace

std::unique_ptr<Kernel> load_gpu_kernel(const Program& program, Backend backend, Scalar scalar, Direction direction,
                                        int device) {
  return std::make_unique<GpuKernel>(program, backend, scalar, direction, device);
}

}  // namespace eqaccel
