#include "matrix_product.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <tuple>

#include "kept.h"
#include "payload.h"
#include "settings.h"

namespace eqaccel {
namespace {

// Of a block that packs B.
constexpr unsigned pack_threads = 256, warp = 32;
constexpr unsigned pack_shared_bytes = pack_threads / warp * sizeof(float);
constexpr int64_t warp_terms = 8 * warp;  // that a warp packs of a column at a time
constexpr std::size_t bytes_of_half = 2;
// Of columns, that a block makes of rows that it keeps (measured on an H100: 7 or 8 of 21 are fastest).
constexpr int64_t most_kept_tiles = 8;
// What a tile costs besides its columns, in columns (measured on an H200).
constexpr int64_t tile_overhead = 24;

// The architecture whose kernel is of other instructions, and what that is compiled for.
constexpr const char *wgmma_device = "sm_90", *wgmma_arch = "sm_90a";

// Published peaks, dense, in TFLOP/s: of float32, which is what torch multiplies with, and of halves with sums in float32.
// Of an architecture it is the product where tensor cores gain least. Not here are 8.7, 11.0 and 12.1, of which there is no
// peak of halves, and 10.0 and 10.3, whose peaks are those of tcgen05, which the kernel does not use.
struct Peaks {
  const char* arch;
  double float32, tensor;
};
constexpr Peaks published_peaks[] = {
    {"sm_80", 19.5, 312},    // A100 data sheet
    {"sm_86", 35.6, 71.2},   // GeForce RTX 3090, GA102 white paper; of A10, A40 and RTX A6000 four times float32
    {"sm_89", 82.6, 165.2},  // GeForce RTX 4090, Ada white paper; of L4 and L40S four times float32
    {"sm_90", 67, 989.4},    // H100 SXM data sheet; by wgmma, of which mma.sync reaches a part
    {"sm_120", 104.8, 209.5}  // GeForce RTX 5090, RTX Blackwell white paper
};

// Whether `products` of halves take no longer than one in float32.
bool pays(const std::string& arch, int64_t products) {
  return std::any_of(std::begin(published_peaks), std::end(published_peaks), [&](const Peaks& peaks) {
    return arch == peaks.arch && peaks.tensor >= static_cast<double>(products) * peaks.float32;
  });
}

}  // namespace

std::optional<std::string> MatrixProduct::compile_arch(const Program& program, const std::string& arch) {
  if (!pays(arch, products(program))) return std::nullopt;
  const int64_t limit = settings::shared_bytes();
  const bool limited = limit < std::numeric_limits<int64_t>::max();  // else every call would add up what bodies take
  const auto fits = [&](const char* body) { return !limited || program.shared_bytes(body) <= limit; };
  if (arch == wgmma_device && fits("tuned/sm_90a/forward/float32")) return wgmma_arch;
  if (!fits("gpu/forward/float32")) return std::nullopt;
  return arch;
}

int64_t MatrixProduct::products(const Program& program) {
  try {
    return program.number("products");
  } catch (const std::out_of_range&) {
    throw bad_payload("matrix products that the installed eqaccel launches",
                      "those of an older one: make or export the model again with it");
  }
}

bool MatrixProduct::adds_rows(const Program& program, const std::string& arch) {
  const std::string body = program.body(Backend::cuda, Scalar::float32, Direction::forward, arch);
  for (int64_t n = program.number(body + "/kernels"); n-- > 0;)
    if (program.number(body + "/" + std::to_string(n) + "/adds_rows") != 0) return true;
  return false;
}

const MatrixProduct& MatrixProduct::get(const Program& program, int device, const std::string& arch) {
  return kept(std::tuple(&program, device, arch),
              [&] { return std::unique_ptr<MatrixProduct>(new MatrixProduct(program, device, arch)); });
}

MatrixProduct::MatrixProduct(const Program& program, int device, const std::string& arch)
    : driver_(GpuDriver::get(Backend::cuda)), device_(device), launches_early_(driver_.device(device).launches_early),
      parts_((products(program) + 1) / 2) {
  const std::string body = program.body(Backend::cuda, Scalar::float32, Direction::forward, arch);
  depth_ = program.number(body + "/depth");
  threads_ = static_cast<unsigned>(program.number(body + "/threads"));
  const Compiled compiled = program.compile(Backend::cuda, Scalar::float32, Direction::forward, arch);
  const GpuDriver::Module module = driver_.load_module(compiled.code, device);
  const DeviceScope scope(driver_, device);
  pack_ = driver_.get_function(module, "eq_pack");
  tilings_.resize(program.number(body + "/kernels"));
  for (std::size_t n = 0; n < tilings_.size(); ++n) {
    Tiling& tiling = tilings_[n];
    const std::string number = std::to_string(n), name = body + "/" + number;
    tiling.width = program.number(name + "/width");
    tiling.height = program.number(name + "/height");
    tiling.kept_terms = program.number(name + "/kept_terms");
    tiling.adds_rows = program.number(name + "/adds_rows") != 0;
    tiling.shared_bytes = static_cast<unsigned>(program.number(name + "/shared_bytes"));
    tiling.kernel = driver_.get_function(module, ("eq_product_" + number).c_str());
    driver_.set_shared_bytes(tiling.kernel, static_cast<int>(tiling.shared_bytes));
    tiling.slots = driver_.device(device).multiprocessors *
                   std::max(driver_.resident_blocks(tiling.kernel, static_cast<int>(threads_), tiling.shared_bytes), 1);
  }
}

bool MatrixProduct::takes(const Matrices& m) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max(), least_height = 64, most_height = 256;
  const auto aligned = [](const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  return m.rows > 0 && m.columns > 0 && m.terms > 0 && m.terms % 4 == 0 && m.columns % 2 == 0 && aligned(m.a, 16) &&
         aligned(m.c, 8) && aligned(m.summands, 8) && m.terms < limit / most_height && m.columns < limit &&
         ceil_div(m.rows, least_height) < limit / m.columns;
}

// Where rows are worth keeping, a kernel that has room for just as many stages; else the width that wastes least of the
// tensor cores' time. The same for any number of rows.
const MatrixProduct::Tiling& MatrixProduct::tiling(const Matrices& m) const {
  const int64_t stages = ceil_div(m.terms, depth_);
  const auto cost = [&](const Tiling& t) {
    const bool keeps_rows = t.kept_terms > 0;
    if (t.adds_rows != (m.summands != nullptr) || (keeps_rows && t.kept_terms != stages * depth_))
      return std::numeric_limits<int64_t>::max();
    const int64_t across = ceil_div(m.columns, t.width);
    return keeps_rows && across > 1 ? 0 : across * (t.width + tile_overhead);
  };
  return *std::min_element(tilings_.begin(), tilings_.end(),
                           [&](const Tiling& a, const Tiling& b) { return cost(a) < cost(b); });
}

// Into how many shares the columns of the same rows are divided: into tiles where their rows are not kept. Those that are
// kept are split anew for each share, which takes about as long as a tile; but all multiprocessors should have as much to
// do, and neighbours in memory should be written at about the same time.
int64_t MatrixProduct::shares_across(const Tiling& t, const Matrices& m) const {
  const int64_t down = ceil_div(m.rows, t.height), across = ceil_div(m.columns, t.width);
  if (t.kept_terms == 0) return across;
  int64_t best = across, least = std::numeric_limits<int64_t>::max();
  for (int64_t shares = ceil_div(across, most_kept_tiles); shares <= across; ++shares) {
    const int64_t time = ceil_div(down * shares, t.slots) * (ceil_div(across, shares) + 1);
    if (time < least) least = time, best = shares;
  }
  return best;
}

int64_t MatrixProduct::padded_columns(const Tiling& t, const Matrices& m) {
  return ceil_div(m.columns, t.width) * t.width;
}

// B in the order in which it is read, each number as `parts_` halves, and a scale of each column.
std::size_t MatrixProduct::workspace_bytes(const Matrices& m) const {
  const auto columns = static_cast<std::size_t>(padded_columns(tiling(m), m));
  const auto halves = static_cast<std::size_t>(parts_ * ceil_div(m.terms, depth_) * depth_);
  return columns * (halves * bytes_of_half + sizeof(float));
}

void MatrixProduct::launch(const Matrices& m, void* workspace, void* stream) const {
  const DeviceScope scope(driver_, device_);
  const Tiling& tiling = this->tiling(m);
  int width = static_cast<int>(tiling.width), columns = static_cast<int>(m.columns), terms = static_cast<int>(m.terms);
  long long row_stride = m.b_row_stride, column_stride = m.b_column_stride, rows = m.rows;
  const float *a = m.a, *b = m.b;
  float* c = m.c;
  const int32_t* summands = m.summands;
  void* pack_parameters[] = {&b, &workspace, &columns, &terms, &row_stride, &column_stride, &width};
  // A thread has a unit of eight terms, as far as a block goes.
  const auto warps = std::bit_ceil(static_cast<unsigned>(ceil_div(m.terms, warp_terms)));
  const unsigned column_threads = std::min(warps * warp, pack_threads),
                 columns_of_block = pack_threads / column_threads;
  const auto pack_blocks = static_cast<unsigned>(ceil_div(padded_columns(tiling, m), columns_of_block));
  driver_.launch(pack_, {pack_blocks}, {column_threads, columns_of_block}, pack_shared_bytes, stream, pack_parameters);
  int across = static_cast<int>(shares_across(tiling, m));
  void* parameters[] = {&a, &workspace, &c, &rows, &columns, &terms, &summands, &across};
  const int64_t shares = ceil_div(m.rows, tiling.height) * across;
  const auto blocks = static_cast<unsigned>(std::min(shares, tiling.slots));
  // While B is packed, which takes no longer than launching.
  if (launches_early_)
    driver_.launch_early(tiling.kernel, {blocks}, {threads_}, tiling.shared_bytes, stream, parameters);
  else driver_.launch(tiling.kernel, {blocks}, {threads_}, tiling.shared_bytes, stream, parameters);
}

}  // namespace eqaccel
