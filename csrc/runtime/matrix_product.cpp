#include "matrix_product.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "kept.h"

namespace eqaccel {
namespace {

constexpr unsigned pack_threads = 256;  // of a block that prepares B
// What a tile costs besides its columns, in columns (measured on an H200).
constexpr int64_t tile_overhead = 24;

}  // namespace

const MatrixProduct& MatrixProduct::get(const Program& program, int device) {
  return kept(std::pair(&program, device),
              [&] { return std::unique_ptr<MatrixProduct>(new MatrixProduct(program, device)); });
}

MatrixProduct::MatrixProduct(const Program& program, int device)
    : driver_(GpuDriver::get(Backend::cuda)), device_(device), depth_(program.number("depth")),
      threads_(static_cast<unsigned>(program.number("threads"))),
      multiprocessors_(driver_.device(device).multiprocessors), launches_early_(driver_.device(device).launches_early) {
  const Compiled compiled = program.compile(Backend::cuda, Scalar::float32, Direction::forward, compile_arch);
  const GpuDriver::Module module = driver_.load_module(compiled.code, device);
  const DeviceScope scope(driver_, device);
  pack_ = driver_.get_function(module, "eq_pack");
  tilings_.resize(program.number("tilings"));
  for (std::size_t n = 0; n < tilings_.size(); ++n) {
    Tiling& tiling = tilings_[n];
    const std::string name = std::to_string(n);
    tiling.width = program.number(name + "/width");
    tiling.height = program.number(name + "/height");
    tiling.kept_terms = program.number(name + "/kept_terms");
    tiling.adds_rows = program.number(name + "/adds_rows") != 0;
    tiling.shared_bytes = static_cast<unsigned>(program.number(name + "/shared_bytes"));
    tiling.kernel = driver_.get_function(module, ("eq_product_" + name).c_str());
    driver_.set_shared_bytes(tiling.kernel, static_cast<int>(tiling.shared_bytes));
  }
}

bool MatrixProduct::takes(const Matrices& m) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max(), least_height = 64, most_height = 256;
  const auto aligned = [](const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  return m.rows > 0 && m.columns > 0 && m.terms > 0 && m.terms % 4 == 0 && m.columns % 2 == 0 && aligned(m.a, 16) &&
         aligned(m.c, 8) && aligned(m.parts, 8) && m.terms < limit / most_height && m.columns < limit &&
         ceil_div(m.rows, least_height) < limit / m.columns;
}

// The width of the tiles that waste least of the tensor cores' time; the same for any number of rows.
int64_t MatrixProduct::width(const Matrices& m) const {
  const auto cost = [&](const Tiling& t) {
    if (t.adds_rows != (m.parts != nullptr)) return std::numeric_limits<int64_t>::max();
    return ceil_div(m.columns, t.width) * (t.width + tile_overhead);
  };
  return std::min_element(tilings_.begin(), tilings_.end(),
                          [&](const Tiling& a, const Tiling& b) { return cost(a) < cost(b); })
      ->width;
}

// One for each multiprocessor; where they keep B, as many for each of its tiles of columns.
int64_t MatrixProduct::blocks(const Tiling& t, const Matrices& m) const {
  const int64_t down = ceil_div(m.rows, t.height), across = ceil_div(m.columns, t.width);
  if (t.kept_terms == 0) return std::min(down * across, multiprocessors_);
  return across * std::min(down, std::max<int64_t>(1, multiprocessors_ / across));
}

// Numbers that the busiest multiprocessor moves to and from the L2 cache.
int64_t MatrixProduct::cost(const Tiling& t, const Matrices& m) const {
  const int64_t tiles = ceil_div(m.rows, t.height) * ceil_div(m.columns, t.width), all_blocks = blocks(t, m);
  const int64_t its_blocks = ceil_div(all_blocks, multiprocessors_);
  const int64_t its_tiles = its_blocks * ceil_div(tiles, all_blocks);
  const int64_t times_b = t.kept_terms > 0 ? its_blocks : its_tiles, heads_and_tails = 2;
  return its_tiles * t.height * (m.terms + t.width) + times_b * heads_and_tails * m.terms * t.width;
}

const MatrixProduct::Tiling& MatrixProduct::tiling(const Matrices& m) const {
  const int64_t width = this->width(m);
  const Tiling* best = nullptr;
  for (const Tiling& t : tilings_) {
    const bool fits =
        t.width == width && t.adds_rows == (m.parts != nullptr) && (t.kept_terms == 0 || m.terms <= t.kept_terms);
    if (fits && (best == nullptr || cost(t, m) < cost(*best, m))) best = &t;
  }
  return *best;
}

// Numbers of B in the order in which they are read; each becomes two.
int64_t MatrixProduct::packed_size(const Matrices& m) const {
  const int64_t width = this->width(m);
  return ceil_div(m.columns, width) * width * ceil_div(m.terms, depth_) * depth_;
}

std::size_t MatrixProduct::workspace_bytes(const Matrices& m) const {
  return 2 * static_cast<std::size_t>(packed_size(m)) * sizeof(float);
}

void MatrixProduct::launch(const Matrices& m, void* workspace, void* stream) const {
  const DeviceScope scope(driver_, device_);
  const Tiling& tiling = this->tiling(m);
  int width = static_cast<int>(tiling.width), columns = static_cast<int>(m.columns), terms = static_cast<int>(m.terms);
  long long row_stride = m.b_row_stride, column_stride = m.b_column_stride, rows = m.rows;
  const float *a = m.a, *b = m.b;
  float* c = m.c;
  const int32_t* parts = m.parts;
  void* pack_parameters[] = {&b, &workspace, &columns, &terms, &row_stride, &column_stride, &width};
  const auto pack_blocks = static_cast<unsigned>(ceil_div(packed_size(m), pack_threads));
  driver_.launch(pack_, {pack_blocks}, {pack_threads}, 0, stream, pack_parameters);
  void* parameters[] = {&a, &workspace, &c, &rows, &columns, &terms, &parts};
  const auto blocks = static_cast<unsigned>(this->blocks(tiling, m));
  // While B is packed, which takes no longer than launching.
  if (launches_early_)
    driver_.launch_early(tiling.kernel, {blocks}, {threads_}, tiling.shared_bytes, stream, parameters);
  else driver_.launch(tiling.kernel, {blocks}, {threads_}, tiling.shared_bytes, stream, parameters);
}

}  // namespace eqaccel
