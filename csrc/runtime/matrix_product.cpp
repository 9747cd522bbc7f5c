#include "matrix_product.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>

namespace eqaccel {
namespace {

// The constants of the kernel.
constexpr int64_t height = 128, depth = 32, stages = 4, a_stride = depth + 8;
constexpr unsigned block_threads = 256, pack_threads = 256;
// What a tile costs besides its columns, in columns (measured on an H200).
constexpr int64_t tile_overhead = 24;

int64_t over(int64_t count, int64_t size) { return (count + size - 1) / size; }
unsigned shared_bytes(int64_t width) {
  return static_cast<unsigned>(stages * (height * a_stride + 2 * depth * width) * sizeof(float));
}
// Numbers of B in the order in which they are read; each becomes two.
int64_t packed_size(const Matrices& m, int64_t width) {
  return over(m.columns, width) * width * over(m.terms, depth) * depth;
}

}  // namespace

const MatrixProduct& MatrixProduct::get(const Program& program, int device) {
  // Leaked on purpose, like the programs: torch may launch while static objects are taken down.
  static auto* const mutex = new std::mutex;
  static auto* const loaded = new std::map<std::pair<const Program*, int>, std::unique_ptr<MatrixProduct>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<MatrixProduct>& found = (*loaded)[{&program, device}];
  if (!found) found.reset(new MatrixProduct(program, device));
  return *found;
}

MatrixProduct::MatrixProduct(const Program& program, int device)
    : driver_(GpuDriver::get(Backend::cuda)), device_(device) {
  const Compiled compiled = program.compile(Backend::cuda, Scalar::float32, Direction::forward, compile_arch);
  const GpuDriver::Module module = driver_.load_module(compiled.code, device);
  const DeviceScope scope(driver_, device);
  pack_ = driver_.get_function(module, "eq_pack");
  const int64_t widths = program.number("widths");
  for (int64_t eights = 1; eights < most_eights; ++eights) {
    if ((widths >> eights & 1) == 0) continue;
    const std::string name = "eq_product_" + std::to_string(8 * eights);
    kernels_[eights] = driver_.get_function(module, name.c_str());
    driver_.set_shared_bytes(kernels_[eights], static_cast<int>(shared_bytes(8 * eights)));
  }
}

bool MatrixProduct::takes(const Matrices& m) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  const auto aligned = [](const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; };
  return m.rows > 0 && m.columns > 0 && m.terms > 0 && m.terms % 4 == 0 && m.columns % 2 == 0 && aligned(m.a, 16) &&
         aligned(m.c, 8) && m.terms < limit / height && m.columns < limit && over(m.rows, height) < limit / m.columns;
}

int64_t MatrixProduct::width(int64_t columns) const {
  int64_t best = 0, best_cost = std::numeric_limits<int64_t>::max();
  for (int64_t eights = 1; eights < most_eights; ++eights) {
    const int64_t cost = over(columns, 8 * eights) * (8 * eights + tile_overhead);
    if (kernels_[eights] == nullptr || cost >= best_cost) continue;
    best = 8 * eights;
    best_cost = cost;
  }
  return best;
}

std::size_t MatrixProduct::workspace_bytes(const Matrices& m) const {
  return 2 * static_cast<std::size_t>(packed_size(m, width(m.columns))) * sizeof(float);
}

void MatrixProduct::launch(const Matrices& m, void* workspace, void* stream) const {
  const DeviceScope scope(driver_, device_);
  int width = static_cast<int>(this->width(m.columns)), columns = static_cast<int>(m.columns);
  int terms = static_cast<int>(m.terms);
  long long row_stride = m.b_row_stride, column_stride = m.b_column_stride, rows = m.rows;
  const float *a = m.a, *b = m.b;
  float* c = m.c;
  void* pack_parameters[] = {&b, &workspace, &columns, &terms, &row_stride, &column_stride, &width};
  const auto pack_blocks = static_cast<unsigned>(over(packed_size(m, width), pack_threads));
  driver_.launch(pack_, {pack_blocks}, {pack_threads}, 0, stream, pack_parameters);
  void* parameters[] = {&a, &workspace, &c, &rows, &columns, &terms};
  const int64_t tiles = over(rows, height) * over(columns, width);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, driver_.device(device_).multiprocessors));
  driver_.launch(kernels_[width / 8], {blocks}, {block_threads}, shared_bytes(width), stream, parameters);
}

}  // namespace eqaccel
