// Launches of the GPU kernels that preludes/gpu.h exports: the main kernels, then the ordered sums of the partial sums of
// rows that were cut and of the per-edge gradients of x.
#include <algorithm>
#include <string>
#include <vector>

#include "gpu_driver.h"
#include "work_split.h"
#include "kernel.h"

namespace eqaccel {
namespace {

constexpr int64_t max_grid = 2147483647;  // blocks that CUDA and HIP launch at most
constexpr unsigned warp_threads = 32;
constexpr unsigned sum_threads = 256;  // of a block that adds partial sums
// What the bounds of eq_gather_gx allow.
constexpr int64_t most_gather_threads = 128, gather_threads_per_sm = 8 * most_gather_threads;
// Gradients of x are gathered from so many bytes at a time, from so many slots of a sender, since each of them looks for
// its own, or from a part of the edges where these are very many.
constexpr int64_t gathered_bytes = int64_t(1) << 30, gathered_slots = 16, most_gathers = 8;

// Shared memory to launch a block with. Where a setting makes a device count as a smaller one, each block reserves so much
// that no more of them are at work on a multiprocessor than there, which has 1 KiB more than a block may take.
unsigned reserved_bytes(const DeviceInfo& info, unsigned bytes) {
  constexpr int of_each_block = 1024, granule = 128;
  if (info.shared_bytes_per_block >= info.device_shared_bytes_per_block) return bytes;
  const int resident = (info.shared_bytes_per_block + of_each_block) / (int(bytes) + of_each_block);
  const int share = info.shared_bytes_per_multiprocessor / std::max(resident, 1) - of_each_block;
  const int reserved = std::min(share, info.device_shared_bytes_per_block) / granule * granule;
  return std::max(bytes, static_cast<unsigned>(std::max(reserved, 0)));
}

// The scratch of a launch: offsets in bytes, each aligned for the widest access. What is absent has size zero.
struct Scratch {
  int64_t gx_edge, partials, gx_partials, bytes;
};

class GpuKernel : public Kernel {
 public:
  GpuKernel(const Program& program, Backend backend, Scalar scalar, Direction direction, int device)
      : driver_(GpuDriver::get(backend)), direction_(direction), device_(device),
        scalar_bytes_(scalar == Scalar::float32 ? 4 : 8), x_dim_(program.number("x_dim")),
        z_dim_(program.number("z_dim")), w_dim_(program.number("w_dim")), layouts_(program.number("layouts")),
        rows_or_graphs_(program.number("rows_or_graphs")), covers_all_(program.number("covers_all")),
        shares_weights_(program.number("shares_weights") && direction < Direction::double_backward) {
    const DeviceInfo& info = driver_.device(device);
    const std::string body = program.body(backend, scalar, direction, info.arch);
    mains_.resize(program.number(body + "/kernels"));
    for (std::size_t n = 0; n < mains_.size(); ++n) {
      Main& main = mains_[n];
      const auto number = [&](const char* key) { return program.number(body + "/" + std::to_string(n) + "/" + key); };
      main.threads = static_cast<unsigned>(number("threads"));
      main.shared_bytes = static_cast<unsigned>(number("shared_bytes"));
      main.edges_held = number("edges_held");
      main.streams_weights = number("streams_weights");
      if (static_cast<int>(main.shared_bytes) > info.shared_bytes_per_block) {
        throw SharedMemoryError(std::string("the ") + name(scalar) + " " + name(direction) + " kernel takes at least " +
                                    std::to_string(main.shared_bytes) + " bytes of shared memory, and a block of " +
                                    info.name + " may take " + std::to_string(info.shared_bytes_per_block) +
                                    ": divide the channels of the tensor product among several",
                                "");
      }
    }
    const Compiled compiled = program.compile(backend, scalar, direction, info.arch);
    const GpuDriver::Module module = driver_.load_module(compiled.code, device);
    add_partials_ = driver_.get_function(module, "eq_add_partials");
    gather_gx_ = driver_.get_function(module, "eq_gather_gx");
    add_gx_partials_ = driver_.get_function(module, "eq_add_gx_partials");
    const DeviceScope scope(driver_, device);
    for (std::size_t n = 0; n < mains_.size(); ++n) {
      Main& main = mains_[n];
      main.function = driver_.get_function(module, ("eq_main_" + std::to_string(n)).c_str());
      main.shared_bytes = reserved_bytes(info, main.shared_bytes);
      driver_.set_shared_bytes(main.function, static_cast<int>(main.shared_bytes));
      main.resident = driver_.resident_blocks(main.function, static_cast<int>(main.threads), main.shared_bytes);
      main.blocks = std::max<int64_t>(info.multiprocessors * main.resident, 1);
      blocks_ = std::max(blocks_, main.blocks);
    }
    launches_early_ = info.launches_early;
    // A row to as many blocks as it takes, with as few idle threads.
    const int64_t width = EQ_ROW_WIDTH(x_dim_, scalar_bytes_);
    gather_parts_ = ceil_div(x_dim_, width * most_gather_threads);
    gather_threads_ = warp_threads * ceil_div(x_dim_, warp_threads * width * gather_parts_);
    gather_blocks_ = info.multiprocessors * gather_threads_per_sm / (gather_threads_ * gather_parts_);
  }

  std::size_t workspace_bytes(const eq_operands& o) const override { return scratch(o, o.num_edges).bytes; }
  std::size_t slots_workspace_bytes(const eq_operands& o, int64_t slots) const override {
    return scratch(o, slots).bytes;
  }

  void launch(const eq_operands& given, void* stream) const override { launch(given, nullptr, all_of(given), stream); }
  void launch_shared(const eq_operands& given, const int32_t* shared, void* stream) const override {
    if (!shares_weights_) return Kernel::launch_shared(given, shared, stream);
    launch(given, shared, all_of(given), stream);
  }
  void launch_slots(const eq_operands& given, const int32_t* shared, const SlotRange& range,
                    void* stream) const override {
    if (!shares_weights_ || direction_ != Direction::backward)
      return Kernel::launch_slots(given, shared, range, stream);
    launch(given, shared, range, stream);
  }

 private:
  static SlotRange all_of(const eq_operands& o) { return {0, o.num_edges, o.num_edges}; }

  // Of many ranges the first clears what all of them add to, and the last writes what they have added up.
  void launch(const eq_operands& given, const int32_t* w_row, const SlotRange& range, void* stream) const {
    check_kind(given);
    const DeviceScope scope(driver_, device_);
    const bool begins = range.first == 0, ends = range.last == given.num_edges;
    const Scratch at = scratch(given, range.most);
    char* const base = static_cast<char*>(given.workspace);
    eq_operands o = given;
    o.workspace = base + at.gx_edge;
    if (direction_ != Direction::forward) o.gw = static_cast<char*>(given.gw) - range.first * w_dim_ * scalar_bytes_;
    const auto clear_gx = [&] {
      driver_.fill_zero(o.gx, given.num_senders * x_dim_ * scalar_bytes_, stream);
      if (has_second()) driver_.fill_zero(o.ga, given.num_senders * x_dim_ * scalar_bytes_, stream);
    };
    const bool adds_gx = direction_ != Direction::forward && given.row_ptr && !given.deterministic;
    if (!given.row_ptr) o.deterministic = 1;  // every row has one edge: there is nothing to add
    if (adds_gx && begins) clear_gx();
    if (!covers_all_ && begins) {  // no path writes some blocks
      if (direction_ != Direction::backward) {
        driver_.fill_zero(o.z, given.num_receivers * z_dim_ * scalar_bytes_, stream);
        driver_.fill_zero(base + at.partials, at.gx_partials - at.partials, stream);
      }
      if (direction_ != Direction::forward && !gathers_gx(given) && !adds_gx) clear_gx();
    }
    const int64_t edges = given.num_edges, together = slots_together(given, range.most);
    eq_work_split to_receivers{}, to_senders = sender_split(given);
    to_senders.partials = base + at.gx_partials;
    void *of_receivers[] = {&o, &to_receivers}, *of_senders[] = {&o, &to_senders};
    for (int64_t first = range.first; first < range.last; first += together) {
      const int64_t last = std::min(first + together, range.last);
      for (const Main& main : mains_) {
        to_receivers = receiver_split(given, main, together);
        to_receivers.partials = base + at.partials;
        to_receivers.w_row = w_row;
        to_receivers.first = static_cast<int32_t>(first);
        to_receivers.last = static_cast<int32_t>(last);
        driver_.launch(main.function, {blocks(to_receivers, given.num_receivers, last - first)}, {main.threads},
                       main.shared_bytes, stream, of_receivers);
      }
      to_senders.first = static_cast<int32_t>(first);
      to_senders.last = static_cast<int32_t>(last);
      if (gathers_gx(given))
        launch_next(gather_gx_, {blocks(to_senders, given.num_senders, edges), unsigned(gather_parts_)},
                    {unsigned(gather_threads_)}, stream, of_senders);
    }
    if (!ends) return;
    if (sums(given))
      add_partials(add_partials_, of_receivers, to_receivers, given.num_receivers, edges, z_dim_, stream);
    if (gathers_gx(given)) {
      add_partials(add_gx_partials_, of_senders, to_senders, given.num_senders, edges, x_dim_, stream);
      if (has_second()) {  // those of a stand behind those of x
        o.gx = given.ga;
        o.workspace = base + at.gx_edge + edges * x_dim_ * scalar_bytes_;
        launch_next(gather_gx_, {blocks(to_senders, given.num_senders, edges), unsigned(gather_parts_)},
                    {unsigned(gather_threads_)}, stream, of_senders);
        add_partials(add_gx_partials_, of_senders, to_senders, given.num_senders, edges, x_dim_, stream);
      }
    }
  }

  // Whether there are other tangents than a, b and c, and gradients of these.
  bool has_second() const { return direction_ == Direction::triple_backward; }

  // A kernel for some of the paths; those of a direction run one after another.
  struct Main {
    GpuDriver::Function function = nullptr;
    unsigned threads = 0, shared_bytes = 0;
    int64_t edges_held = 1;  // in the stages of a block
    bool streams_weights = false;  // whether they are most of what it moves
    int64_t resident = 1, blocks = 1;  // blocks that a multiprocessor and the device hold at a time

    Blocks among(int64_t count) const { return {count, threads / warp_threads, edges_held, streams_weights}; }
  };

  // Throws std::invalid_argument for operands that the kernels are not made for.
  void check_kind(const eq_operands& o) const {
    const auto expect = [](int64_t taken, bool first, const char* what, const char* other) {
      if (taken & (first ? 1 : 2)) return;
      throw std::invalid_argument(std::string("payload: expected kernels for ") + (first ? what : other) +
                                  ", got those for " + (first ? other : what) + ": make a module for such operands");
    };
    expect(layouts_, o.mul_ir, "blocks laid out (mul, 2l+1)", "blocks laid out (2l+1, mul)");
    expect(rows_or_graphs_, !o.row_ptr, "rows without a graph", "graphs");
  }

  // Whether gradients of x are kept per edge first, to be added up in a fixed order: in a graph, if that is asked for.
  bool gathers_gx(const eq_operands& o) const {
    return direction_ != Direction::forward && o.row_ptr && o.deterministic;
  }

  // Whether a receiver's edges are added up.
  bool sums(const eq_operands& o) const { return direction_ != Direction::backward && o.row_ptr; }

  // Slots between two gathers. The backward gathers gradients of x several times if they take much memory, at 30
  // microseconds each; double backward, which has outputs of its own for a receiver, once.
  int64_t slots_together(const eq_operands& o, int64_t most) const {
    if (!gathers_gx(o) || direction_ != Direction::backward) return most;
    const int64_t row = x_dim_ * scalar_bytes_;
    const int64_t at_once = std::max(gathered_bytes, gathered_slots * o.num_senders * row);
    return ceil_div(most, std::clamp<int64_t>(ceil_div(most * row, at_once), 1, most_gathers));
  }
  // The same for all kernels where these add up rows, whose partial sums they leave to one `add_partials`.
  eq_work_split receiver_split(const eq_operands& o, const Main& main, int64_t together) const {
    if (!o.row_ptr) return split_batch(o.num_edges, main.among(blocks_));
    const SlotsOfRows graph{o.num_edges, o.num_receivers};
    if (!sums(o)) return split_without_sums(graph, main.among(main.blocks), main.resident, together);
    return split_with_sums(graph, mains_[0].among(blocks_), direction_, w_dim_ > z_dim_);
  }
  eq_work_split sender_split(const eq_operands& o) const {
    return split_by_rows({o.num_edges, o.num_senders}, gather_blocks_);
  }
  static unsigned blocks(const eq_work_split& split, int64_t rows, int64_t slots) {
    return grid(split.size > 0 ? ceil_div(slots, split.size) : rows + (slots - 1) / split.cut);
  }
  // Rows of the scratch that holds partial sums.
  static int64_t partials(const eq_work_split& split, int64_t slots) { return 2 * (slots / split.cut + 1); }

  // A kernel that waits by itself for the one before it.
  void launch_next(GpuDriver::Function kernel, Dim3 grid, Dim3 block, void* stream, void** parameters) const {
    if (launches_early_) driver_.launch_early(kernel, grid, block, 0, stream, parameters);
    else driver_.launch(kernel, grid, block, 0, stream, parameters);
  }

  void add_partials(GpuDriver::Function kernel, void** parameters, const eq_work_split& split, int64_t rows,
                    int64_t slots, int64_t columns, void* stream) const {
    if (split.size == 0 && slots <= split.cut) return;  // no row can be cut
    // Of many rows few are cut, as a rule.
    const int64_t blocks = std::min(rows, 2 * blocks_);
    const int64_t parts = std::clamp<int64_t>(4 * blocks_ / blocks, 1, ceil_div(columns, sum_threads));
    launch_next(kernel, {grid(blocks), unsigned(parts)}, {sum_threads}, stream, parameters);
  }

  Scratch scratch(const eq_operands& o, int64_t most) const {
    const int64_t together = slots_together(o, most);
    int64_t used = 0;
    auto take = [&](bool needed, int64_t elements) {
      const int64_t offset = used;
      if (needed) used += (elements * scalar_bytes_ + 255) / 256 * 256;
      return offset;
    };
    Scratch at{};
    at.gx_edge = take(gathers_gx(o), together * x_dim_ * (has_second() ? 2 : 1));
    at.partials = take(sums(o), partials(receiver_split(o, mains_[0], together), o.num_edges) * z_dim_);
    at.gx_partials = take(gathers_gx(o), partials(sender_split(o), o.num_edges) * x_dim_);
    at.bytes = used;
    return at;
  }

  static unsigned grid(int64_t blocks) { return static_cast<unsigned>(std::min(blocks, max_grid)); }

  const GpuDriver& driver_;
  Direction direction_;
  int device_;
  int64_t scalar_bytes_, x_dim_, z_dim_, w_dim_;
  int64_t blocks_ = 1, gather_blocks_ = 1;  // that the device holds at a time
  int64_t gather_parts_ = 1, gather_threads_ = 0;  // blocks of a row, threads of a block
  // What main kernels take: layouts (mul, 2l+1), (2l+1, mul) or both, and rows without a graph, graphs or both.
  int64_t layouts_, rows_or_graphs_;
  bool covers_all_, shares_weights_, launches_early_ = false;
  std::vector<Main> mains_;
  GpuDriver::Function add_partials_ = nullptr, gather_gx_ = nullptr, add_gx_partials_ = nullptr;
};

// A tensor product without paths has no kernels: its outputs are zero.
class GpuZeros : public Kernel {
 public:
  GpuZeros(const Program& program, Backend backend, Scalar scalar, int device)
      : driver_(GpuDriver::get(backend)), device_(device), scalar_bytes_(scalar == Scalar::float32 ? 4 : 8),
        x_dim_(program.number("x_dim")), y_dim_(program.number("y_dim")), z_dim_(program.number("z_dim")),
        w_dim_(program.number("w_dim")) {}

  std::size_t workspace_bytes(const eq_operands&) const override { return 0; }

  void launch(const eq_operands& o, void* stream) const override {
    const DeviceScope scope(driver_, device_);
    const auto fill = [&](void* rows, int64_t elements) {
      if (rows && elements > 0) driver_.fill_zero(rows, elements * scalar_bytes_, stream);
    };
    fill(o.z, o.num_receivers * z_dim_);
    fill(o.gx, o.num_senders * x_dim_);
    fill(o.gy, o.num_edges * y_dim_);
    fill(o.gw, o.num_edges * w_dim_);
    fill(o.ga, o.num_senders * x_dim_);
    fill(o.gb, o.num_edges * y_dim_);
    fill(o.gc, o.num_edges * w_dim_);
  }

 private:
  const GpuDriver& driver_;
  int device_;
  int64_t scalar_bytes_, x_dim_, y_dim_, z_dim_, w_dim_;
};

}  // namespace

std::unique_ptr<Kernel> load_gpu_kernel(const Program& program, Backend backend, Scalar scalar, Direction direction,
                                        int device) {
  const std::string body = program.body(backend, scalar, direction, GpuDriver::get(backend).device(device).arch);
  if (program.number(body + "/kernels") == 0) return std::make_unique<GpuZeros>(program, backend, scalar, device);
  return std::make_unique<GpuKernel>(program, backend, scalar, direction, device);
}

}  // namespace eqaccel
