#include "matrix_product.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "kept.h"

namespace eqaccel {
namespace {

constexpr unsigned pack_threads = 256;
// What a tile costs besides its columns, in columns (measured on an H200).
constexpr int64_t tile_overhead = 24;

}  // namespace

const MatrixProduct& MatrixProduct::get(const Program& program, int device) {
  return kept(std::pair(&program, device),
              [&] { return std::unique_ptr<MatrixProduct>(new MatrixProduct(program, device)); });
}

MatrixProduct::MatrixProduct(const Program& program, int device)
    : driver_(GpuDriver::get(Backend::cuda)), device_(device), height_(program.number("height")),
      depth_(program.number("depth")), threads_(static_cast<unsigned>(program.number("threads"))) {
  const Compiled compiled = program.compile(Backend::cuda, Scalar::float32, Direction::forward, compile_arch);
  const GpuDriver::Module module = driver_.load_module(compiled.code, device);
  const DeviceScope scope(driver_, device);
  pack_ = driver_.get_function(module, "eq_pack");
  tiles_.resize(program.number("widths"));
  for (std::size_t n = 0; n < tiles_.size(); ++n) {
    Tile& tile = tiles_[n];
    tile.width = program.number(std::to_string(n) + "/width");
    tile.shared_bytes = static_cast<unsigned>(program.number(std::to_string(n) + "/shared_bytes"));
    tile.kernel = driver_.get_function(module, ("eq_product_" + std::to_string(tile.width)).c_str());
    driver_.set_shared_bytes(tile.kernel, static_cast<int>(tile.shared_bytes));
  }
}

bool MatrixProduct::takes(const Matrices& m) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max(), least_height = 64, most_height = 256;
  const auto aligned = [](const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  return m.rows > 0 && m.columns > 0 && m.terms > 0 && m.terms % 4 == 0 && m.columns % 2 == 0 && aligned(m.a, 16) &&
         aligned(m.c, 8) && m.terms < limit / most_height && m.columns < limit &&
         ceil_div(m.rows, least_height) < limit / m.columns;
}

// The tiles that waste least of the tensor cores' time.
const MatrixProduct::Tile& MatrixProduct::tile(int64_t columns) const {
  const auto cost = [&](const Tile& tile) { return ceil_div(columns, tile.width) * (tile.width + tile_overhead); };
  return *std::min_element(tiles_.begin(), tiles_.end(),
                           [&](const Tile& a, const Tile& b) { return cost(a) < cost(b); });
}

// Numbers of B in the order in which they are read; each becomes two.
int64_t MatrixProduct::packed_size(const Matrices& m) const {
  const int64_t width = tile(m.columns).width;
  return ceil_div(m.columns, width) * width * ceil_div(m.terms, depth_) * depth_;
}

std::size_t MatrixProduct::workspace_bytes(const Matrices& m) const {
  return 2 * static_cast<std::size_t>(packed_size(m)) * sizeof(float);
}

void MatrixProduct::launch(const Matrices& m, void* workspace, void* stream) const {
  const DeviceScope scope(driver_, device_);
  const Tile& tile = this->tile(m.columns);
  int width = static_cast<int>(tile.width), columns = static_cast<int>(m.columns), terms = static_cast<int>(m.terms);
  long long row_stride = m.b_row_stride, column_stride = m.b_column_stride, rows = m.rows;
  const float *a = m.a, *b = m.b;
  float* c = m.c;
  void* pack_parameters[] = {&b, &workspace, &columns, &terms, &row_stride, &column_stride, &width};
  const auto pack_blocks = static_cast<unsigned>(ceil_div(packed_size(m), pack_threads));
  driver_.launch(pack_, {pack_blocks}, {pack_threads}, 0, stream, pack_parameters);
  void* parameters[] = {&a, &workspace, &c, &rows, &columns, &terms};
  const int64_t tiles = ceil_div(rows, height_) * ceil_div(columns, width);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, driver_.device(device_).multiprocessors));
  driver_.launch(tile.kernel, {blocks}, {threads_}, tile.shared_bytes, stream, parameters);
}

}  // namespace eqaccel
