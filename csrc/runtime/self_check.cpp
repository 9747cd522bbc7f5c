#include "self_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <locale>
#include <map>
#include <sstream>

namespace eqaccel {

double check_problem::number(uint32_t sequence, uint32_t position) {
  uint32_t n = position + (sequence << 24);
  n ^= n >> 16;
  n *= 0x7feb352du;
  n ^= n >> 15;
  n *= 0x846ca68bu;
  n ^= n >> 16;
  const double magnitude = (128.0 + (n & 127)) / 128.0;
  return n & 128 ? -magnitude : magnitude;
}

namespace {

using namespace check_problem;

struct Input {
  char kind;  // of its rows
  const void* eq_operands::* field;
  Direction first;  // that reads it
  uint32_t sequence;  // of random numbers
};
constexpr Input inputs[] = {
    {'x', &eq_operands::x, Direction::forward, 0},          {'y', &eq_operands::y, Direction::forward, 1},
    {'w', &eq_operands::w, Direction::forward, 2},          {'z', &eq_operands::gz, Direction::backward, 3},
    {'x', &eq_operands::a, Direction::double_backward, 4},  {'y', &eq_operands::b, Direction::double_backward, 5},
    {'w', &eq_operands::c, Direction::double_backward, 6},  {'x', &eq_operands::p, Direction::triple_backward, 9},
    {'y', &eq_operands::q, Direction::triple_backward, 10}, {'w', &eq_operands::r, Direction::triple_backward, 11},
    {'z', &eq_operands::g, Direction::triple_backward, 12}};
struct Output {
  const char* name;
  char kind;
  void* eq_operands::* field;
  bool of_tangent;  // written by the triple backward alone
};
constexpr Output outputs[] = {{"z", 'z', &eq_operands::z, false},   {"gx", 'x', &eq_operands::gx, false},
                              {"gy", 'y', &eq_operands::gy, false}, {"gw", 'w', &eq_operands::gw, false},
                              {"ga", 'x', &eq_operands::ga, true},  {"gb", 'y', &eq_operands::gb, true},
                              {"gc", 'w', &eq_operands::gc, true}};

bool writes(Direction direction, const Output& output, const RowSizes& sizes) {
  const bool of_weights = sizes.shared_weights && direction == Direction::double_backward;
  if (sizes.shared_weights && (output.kind == 'y' || (output.kind == 'w') != of_weights)) return false;
  if (output.of_tangent) return direction == Direction::triple_backward;
  return direction >= Direction::double_backward || (direction == Direction::forward) == (output.kind == 'z');
}

// A projection of a right kernel is off by more than this, times eps and the block's size, once in 10^13 checks: an
// element is off by at most 8 eps times the sum of its absolute terms (eqaccel/testing.py) and multiplied by at most 2,
// and the signs of the multipliers are random, so that 8 times the root of the sum of squares is Hoeffding's bound.
constexpr double tolerance = 8 * 2 * 8;

struct Block {
  int64_t first, channels, components;
};

// The rows of one kind of operand.
struct Rows {
  int64_t count = 0, dim = 0;
  std::vector<Block> blocks;

  // Calls visit(block, position in memory, position in the (2l+1, mul) layout) for every element. The latter position
  // says which random number belongs to an element, so that the checksums hold for both layouts.
  template <class Visit>
  void each(bool mul_ir, const Visit& visit) const {
    for (int64_t row = 0; row < count; ++row) {
      for (std::size_t b = 0; b < blocks.size(); ++b) {
        const auto& [first, channels, components] = blocks[b];
        const int64_t start = row * dim + first;
        for (int64_t i = 0; i < components; ++i) {
          for (int64_t u = 0; u < channels; ++u) {
            visit(b, start + (mul_ir ? u * components + i : i * channels + u), start + i * channels + u);
          }
        }
      }
    }
  }
};

std::invalid_argument bad_checksums() {
  return std::invalid_argument("payload: expected self-check checksums for every block, got others");
}

bool has_one_row(const RowSizes& sizes) { return sizes.shared_weights || sizes.summed_weights; }
bool has_graph(const RowSizes& sizes) { return sizes.y > 0 && !has_one_row(sizes); }

std::map<char, Rows> read_blocks(const std::string& text, const RowSizes& sizes) {
  const std::map<char, int64_t> dims = {{'x', sizes.x}, {'y', sizes.y}, {'z', sizes.z}, {'w', sizes.w}};
  std::map<char, Rows> kinds;
  kinds['x'].count = num_senders;
  kinds['y'].count = kinds['w'].count = num_edges;
  kinds['z'].count = num_receivers;
  std::istringstream lines(text);
  lines.imbue(std::locale::classic());
  Block block{};
  for (char kind; lines >> kind >> block.channels >> block.components;) {
    const auto dim = dims.find(kind);
    if (dim == dims.end()) throw bad_checksums();
    Rows& rows = kinds[kind];
    // A kernel that was made for other rows would reach outside of those that this makes.
    const int64_t left = dim->second - rows.dim;
    if (block.channels <= 0 || block.components <= 0 || block.channels > left / block.components) throw bad_checksums();
    block.first = rows.dim;
    rows.blocks.push_back(block);
    rows.dim += block.channels * block.components;
  }
  for (const auto& [kind, dim] : dims) {
    if (kinds[kind].dim != dim || !lines.eof()) throw bad_checksums();
  }
  if (!has_graph(sizes)) {
    for (char kind : {'x', 'y', 'z', 'w'}) kinds[kind].count = batch_rows;
  }
  if (has_one_row(sizes)) kinds['w'].count = 1;
  return kinds;
}

// Memory of an operand between stretches of NaN: a kernel that reads those, or leaves out an element of an output,
// gives NaN, and one that writes there is noticed.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count) : cells_(count + 2 * guard, nan), count_(count) {
    const auto address = reinterpret_cast<uintptr_t>(cells_.data() + guard);
    first_ = guard - address % alignment / sizeof(T);
  }
  T* data() { return cells_.data() + first_; }
  bool intact() const {
    const auto begin = cells_.begin() + first_, end = begin + count_;
    const auto is_nan = [](T cell) { return std::isnan(cell); };
    return std::all_of(cells_.begin(), begin, is_nan) && std::all_of(end, cells_.end(), is_nan);
  }

 private:
  static constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  static constexpr std::size_t guard = 1024, alignment = 64;  // bytes, as any SIMD type takes
  std::vector<T> cells_;
  std::size_t count_, first_;
};

// Numbers of the problem are exact in bfloat16, the upper half of a float.
void put_bfloat16(void* values, int64_t at, double number) {
  const auto value = static_cast<float>(number);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto upper = static_cast<uint16_t>(bits >> 16);
  std::memcpy(static_cast<char*>(values) + at * sizeof upper, &upper, sizeof upper);
}

template <class T>
std::string check_layout(const Kernel& kernel, Direction direction, const std::map<char, Rows>& kinds,
                         const RowSizes& sizes, const std::string& checksums, bool mul_ir) {
  std::vector<Guarded<T>> arrays;
  eq_operands o{};
  for (const Input& input : inputs) {
    if (direction < input.first) continue;
    const Rows& rows = kinds.at(input.kind);
    const bool rounded = input.kind == 'w' && sizes.rounded_weights;
    const int64_t elements = rows.count * rows.dim;
    T* values = arrays.emplace_back(rounded ? (elements + 1) / 2 : elements).data();
    rows.each(mul_ir, [&](std::size_t, int64_t at, int64_t place) {
      if (rounded) put_bfloat16(values, at, number(input.sequence, place));
      else values[at] = T(number(input.sequence, place));
    });
    o.*input.field = values;
  }
  for (const Output& output : outputs) {
    const Rows& rows = kinds.at(output.kind);
    if (writes(direction, output, sizes)) o.*output.field = arrays.emplace_back(rows.count * rows.dim).data();
  }
  if (has_graph(sizes)) {
    o.row_ptr = row_ptr;
    o.edge = edge;
    o.sender = sender;
    o.t_row_ptr = t_row_ptr;
    o.t_slot = t_slot;
  }
  o.num_receivers = kinds.at('z').count;
  o.num_senders = kinds.at('x').count;
  o.num_edges = kinds.at('y').count;
  o.w_stride = o.c_stride = o.r_stride = has_one_row(sizes) ? 0 : kinds.at('w').dim;
  o.mul_ir = mul_ir;
  o.threads = 1;
  o.workspace = arrays.emplace_back((kernel.workspace_bytes(o) + sizeof(T) - 1) / sizeof(T)).data();
  kernel.launch(o, nullptr);

  std::istringstream lines(checksums);
  lines.imbue(std::locale::classic());
  std::ostringstream differences;
  for (const Guarded<T>& array : arrays) {
    if (!array.intact()) differences << "it writes outside of its operands and workspace\n";
  }
  for (const Output& output : outputs) {
    if (!writes(direction, output, sizes)) continue;
    const Rows& rows = kinds.at(output.kind);
    const T* values = static_cast<const T*>(o.*output.field);
    std::vector<std::array<double, projections.size()>> sums(rows.blocks.size());
    rows.each(mul_ir, [&](std::size_t block, int64_t at, int64_t place) {
      for (std::size_t p = 0; p < projections.size(); ++p) sums[block][p] += number(projections[p], place) * values[at];
    });
    for (std::size_t block = 0; block < rows.blocks.size(); ++block) {
      std::string name;
      double size;
      if (!(lines >> name >> size) || name != output.name) throw bad_checksums();
      const double bound = tolerance * std::numeric_limits<T>::epsilon() * size;
      for (double sum : sums[block]) {
        double expected;
        if (!(lines >> expected)) throw bad_checksums();
        if (std::abs(sum - expected) <= bound) continue;  // not so for NaN
        differences << name << ", block " << block << ", " << (mul_ir ? "mul_ir" : "ir_mul") << " layout: projection "
                    << expected << " expected, +-" << bound << ", got " << sum << "\n";
      }
    }
  }
  return differences.str();
}

}  // namespace

std::string self_check(const Kernel& kernel, Scalar scalar, Direction direction, const RowSizes& sizes,
                       const std::string& blocks, const std::string& checksums) {
  const std::map<char, Rows> kinds = read_blocks(blocks, sizes);
  const auto check = scalar == Scalar::float32 ? check_layout<float> : check_layout<double>;
  return check(kernel, direction, kinds, sizes, checksums, true) +
         check(kernel, direction, kinds, sizes, checksums, false);
}

}  // namespace eqaccel
