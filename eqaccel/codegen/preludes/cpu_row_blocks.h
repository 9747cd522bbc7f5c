// CPU prelude of tensor products of any mode whose rows, those of a batch, share their weights: a lane is a row.
//
// Rows are taken in blocks, which are transposed: an array holds an element of all rows, two SIMD vectors, then the next.
#pragma once
#include "cpu_block_paths.h"

namespace {

// ---- rows to arrays and back

// Rows of `dim` elements of irreps, (mul, 2l+1) or (2l+1, mul) in each block, and arrays, whose elements have the latter
// order. Of rows that are not there, elements are zero, or are not written.
template <class Blocks, int dim>
class Transposed {
 public:
  explicit Transposed(bool is_mul_ir) { set_places(is_mul_ir); }

  void fill(const T* rows, int count, T* arrays) const {
    transpose_rows<dim>(
        [&](int h, int first, int n) { return h + n < count ? get_part<dim>(row(rows, h + n), first) : Lane{}; },
        [&](int h, int first, int n, Lane values) {
          if (first + n < dim) put(arrays + place_[first + n] * height + h, values);
        });
  }
  void empty(const T* arrays, int count, T* rows) const {
    transpose_rows<dim>([&](int h, int first,
                            int n) { return first + n < dim ? get(arrays + place_[first + n] * height + h) : Lane{}; },
                        [&](int h, int first, int n, Lane values) {
                          if (h + n < count) put_part<dim>(row(rows, h + n), first, values);
                        });
  }

 private:
  template <class Element>
  static EQ_FN Element* row(Element* rows, int64_t number) {
    return rows + number * dim;
  }
  template <int n = 0>
  void set_places(bool is_mul_ir) {
    if constexpr (n < Blocks::count) {
      constexpr RowBlock b = Blocks::block(n);
      for (int i = 0; i < b.dim; ++i)
        for (int u = 0; u < b.mul; ++u)
          place_[b.offset + (is_mul_ir ? u * b.dim + i : i * b.mul + u)] = b.offset + i * b.mul + u;
      set_places<n + 1>(is_mul_ir);
    }
  }
  int place_[dim > 0 ? dim : 1];  // in arrays, of each element of a row
};

template <class P>
struct BlockWorker {
  static constexpr int64_t array = (P::d3 * piece > P::z_dim ? P::d3 * piece : P::z_dim) * height;
  static constexpr int64_t rows = height * padded(P::z_dim) + vectors * lanes;  // read as whole vectors
  static constexpr int64_t elements = height * (3 * (P::x_dim + P::y_dim) + 2 * P::z_dim) + 2 * rows + 4 * array;

  const eq_operands& o;
  const Transposed<typename P::X, P::x_dim> x_rows;
  const Transposed<typename P::Y, P::y_dim> y_rows;
  const Transposed<typename P::Z, P::z_dim> z_rows;
  BlockState e;
  int64_t first = 0;
  int count = 0;  // rows of the block

  BlockWorker(const eq_operands& operands, T* memory)
      : o(operands), x_rows(o.mul_ir), y_rows(true), z_rows(o.mul_ir), e() {
    const auto take = [&](int64_t size) {
      memory += size;
      return memory - size;
    };
    T **const of_x[] = {&e.x, &e.a, &e.gx}, **const of_y[] = {&e.y, &e.b, &e.gy}, **const of_z[] = {&e.z, &e.gz};
    T** const arrays[] = {&e.t, &e.ta, &e.gt, &e.gtc};
    for (T** each : arrays) *each = take(array);
    for (T** each : of_x) *each = take(height * P::x_dim);
    for (T** each : of_y) *each = take(height * P::y_dim);
    for (T** each : of_z) *each = take(height * P::z_dim);
    e.gz_rows = take(rows);
    e.rows = take(rows);
    e.w = static_cast<const T*>(o.w);
    e.c = static_cast<const T*>(o.c);
  }

  template <class Blocks, int dim>
  void fill(const Transposed<Blocks, dim>& order, const void* rows, T* arrays) const {
    order.fill(static_cast<const T*>(rows) + first * dim, count, arrays);
  }
  template <class Blocks, int dim>
  void empty(const Transposed<Blocks, dim>& order, const T* arrays, void* rows) const {
    order.empty(arrays, count, static_cast<T*>(rows) + first * dim);
  }

  // The block of this number; adds gradients of weights to `gw`.
  void run(int64_t number, T* gw) {
    first = number * height;
    count = o.num_edges - first < height ? o.num_edges - first : height;
    fill(x_rows, o.x, e.x);
    fill(y_rows, o.y, e.y);
    if (has_tangents) {
      fill(x_rows, o.a, e.a);
      fill(y_rows, o.b, e.b);
    }
    if (writes_z) memset(e.z, 0, height * P::z_dim * sizeof(T));
    if (has_gradient) {
      fill(z_rows, o.gz, e.gz);
      transpose_arrays<P::z_dim>(e.gz, e.gz_rows);
      memset(e.gx, 0, height * P::x_dim * sizeof(T));
      memset(e.gy, 0, height * P::y_dim * sizeof(T));
      e.gw = gw;
    }
    P::each_shape([&](auto shape) {
      typedef decltype(shape) S;
      for (int n = 0; n < S::paths; ++n) {
        const PathPlace at = S::place(n);
        PathOf<S, P::z_dim>::run(e, at);
      }
    });
    if (writes_z) empty(z_rows, e.z, o.z);
    if (!has_gradient) return;
    empty(x_rows, e.gx, o.gx);
    empty(y_rows, e.gy, o.gy);
  }
};

inline int64_t block_count(const eq_operands& o) { return (o.num_edges + height - 1) / height; }
// Gradients of weights are added up over some blocks each, and these sums in order: results do not depend on threads.
// Those of many weights take memory, so that there are fewer.
template <class P>
int64_t sum_count(const eq_operands& o) {
  constexpr int64_t many = 48, some = 4, least_blocks = 4, fitting = (1 << 24) / (P::w_dim > 0 ? P::w_dim : 1);
  constexpr int64_t most = fitting > many ? many : fitting > some ? fitting : some;
  const int64_t count = block_count(o) / least_blocks;
  return !has_gradient ? 0 : count < 1 ? 1 : count < most ? count : most;
}

// Whether rows share their weights, and their gradient is one row.
inline bool shares_weights(const eq_operands& o) { return !o.row_ptr && o.w_stride == 0 && o.c_stride == 0; }

template <class P>
void launch_blocks(const eq_operands& o) {
  const Scratch memory(BlockWorker<P>::elements, o.threads);
  const int64_t blocks = block_count(o), sums = sum_count<P>(o);
  T* const space = static_cast<T*>(o.workspace);
#pragma omp parallel num_threads(o.threads)
  {
    BlockWorker<P> worker(o, memory.own());
    if constexpr (!has_gradient) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t block = 0; block < blocks; ++block) worker.run(block, nullptr);
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t sum = 0; sum < sums; ++sum) {
        T* const gw = space + sum * P::w_dim;
        memset(gw, 0, P::w_dim * sizeof(T));
        for (int64_t block = sum * blocks / sums; block < (sum + 1) * blocks / sums; ++block) worker.run(block, gw);
      }
      T* const gw = static_cast<T*>(o.gw);
#pragma omp for schedule(static)
      for (int64_t n = 0; n < P::w_dim; ++n) {
        T total = space[n];
        for (int64_t sum = 1; sum < sums; ++sum) total += space[sum * P::w_dim + n];
        gw[n] = total;
      }
    }
  }
}

}  // namespace

#define EQ_EXPORT_ROW_BLOCKS(P)                                                                                        \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    if (shares_weights(*o)) launch_blocks<P>(*o);                                                                      \
    else launch_pairs<P>(*o);                                                                                          \
  }                                                                                                                    \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return (shares_weights(*o) ? sum_count<P>(*o) * P::w_dim : pair_space<P>(*o)) * int64_t(sizeof(T));                \
  }
