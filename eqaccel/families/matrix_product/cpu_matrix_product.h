// CPU prelude of plain matrix products: z = x w, where x is (num_edges, num_senders) and w is (num_senders, w_stride).
//
// The columns of w are packed into panels of two SIMD vectors. Some rows of x are laid out beside each other, so that all
// addresses follow from one, and are multiplied by a panel after another while their sums stay in registers. Where that is
// not worth a copy, rows are read where they are. A sum is in the order of its terms, whatever the other rows are. Where
// rows are sums of two rows of x, these are added when they are laid out.
#pragma once
#include "abi.h"
#include "cpu_lane.h"

namespace {

constexpr int panel = 2 * lanes;
constexpr int tile_rows = EQ_SIMD_BYTES == 64 ? 12 : 6;  // as many sums as registers hold
constexpr int depth = 64;  // terms that are laid out together
constexpr int64_t block_bytes = 64 << 10;  // of rows that are laid out: they stay in the second-level cache
constexpr int most_tiles = 4;  // of a block, for each of which a panel is read again
constexpr int few_panels = 2;  // that a copy of rows in a cache is not worth

struct Product {
  const eq_operands& o;
  // (num_edges, 2) rows of x that a row is the sum of, or null; the second is -1 for none, -2 for zeros.
  const int32_t* summands;
  const int64_t rows = o.num_edges, terms = o.num_senders, columns = o.w_stride;
  const int64_t panels = (columns + panel - 1) / panel;
  // Whole lines of results that fill the caches are written past them.
  const bool stream =
      columns % lanes == 0 && uintptr_t(o.z) % EQ_SIMD_BYTES == 0 && rows * columns * int64_t(sizeof(T)) > much;
  const bool copies = summands || (terms > depth && (panels > few_panels || rows * terms * int64_t(sizeof(T)) > much));

  T* packed(int64_t p) const { return static_cast<T*>(o.workspace) + p * terms * panel; }
  int64_t tile_size() const { return terms * tile_rows; }
  int tiles_of_block() const {
    const int64_t fit = block_bytes / int64_t(tile_size() * sizeof(T));
    return fit < 1 ? 1 : fit < most_tiles ? int(fit) : most_tiles;
  }

  void pack(int64_t p) const {
    const int64_t left = columns - p * panel, count = left < panel ? left : panel;
    T* to = packed(p);
    for (int64_t k = 0; k < terms; ++k, to += panel) {
      memcpy(to, static_cast<const T*>(o.w) + k * columns + p * panel, count * sizeof(T));
      if (count < panel) memset(to + count, 0, (panel - count) * sizeof(T));
    }
  }

  // What a row is the sum of; the second is null for none, both are for zeros.
  struct Parts {
    const T *left, *right;
  };
  EQ_FN Parts parts_of(int64_t row) const {
    const T* x = static_cast<const T*>(o.x);
    if (!summands) return {x + row * terms, nullptr};
    const int64_t left = summands[2 * row], right = summands[2 * row + 1];
    return {right < -1 ? nullptr : x + left * terms, right < 0 ? nullptr : x + right * terms};
  }

  bool is_laid_out(int64_t first) const { return copies || first + tile_rows > rows; }
  // Rows from `first` on, in pieces of `depth` terms; past the last row it is repeated.
  const T* lay_out(int64_t first, T* to) const {
    if (!is_laid_out(first)) return static_cast<const T*>(o.x) + first * terms;
    for (int r = 0; r < tile_rows; ++r) {
      const Parts row = parts_of(first + r < rows ? first + r : rows - 1);
      for (int64_t k = 0; k < terms; k += depth) {
        const int64_t count = terms - k < depth ? terms - k : depth;
        T* piece = to + k * tile_rows + r * count;
        if (row.right) add_rows(row.left + k, row.right + k, count, piece);
        else if (row.left) memcpy(piece, row.left + k, count * sizeof(T));
        else memset(piece, 0, count * sizeof(T));
      }
    }
    return to;
  }

  // A share of the rows from `first` on, which are laid out next: all panels together fetch them.
  EQ_FN void fetch_share(int64_t first, int64_t p, int64_t k) const {
    for (int64_t r = p; r < tile_rows && first + r < rows; r += panels) {
      const Parts row = parts_of(first + r);
      if (!row.left) continue;
      for (int u = 0; u < depth; u += 64 / int(sizeof(T))) {
        __builtin_prefetch(row.left + k + u, 0, 2);
        if (row.right) __builtin_prefetch(row.right + k + u, 0, 2);
      }
    }
  }
  EQ_FN static void add_rows(const T* left, const T* right, int64_t count, T* sum) {
    int64_t u = 0;
    for (; u + lanes <= count; u += lanes)
      *(UnalignedLane*)(sum + u) = *(const UnalignedLane*)(left + u) + *(const UnalignedLane*)(right + u);
    for (; u < count; ++u) sum[u] = left[u] + right[u];
  }

  template <int step>
  EQ_FN static void add(const T* x, int64_t stride, const T* w, int64_t count, Lane (&sum)[tile_rows][2]) {
    for (int64_t k = 0; k < count; ++k, w += panel) {
      const Lane left = *(const UnalignedLane*)w, right = *(const UnalignedLane*)(w + lanes);
#pragma GCC unroll 16
      for (int r = 0; r < tile_rows; ++r) {
        const T value = x[r * (step ? step : stride) + k];
        sum[r][0] = fma(value, left, sum[r][0]);
        sum[r][1] = fma(value, right, sum[r][1]);
      }
    }
  }

  // Rows from `first` on, as `lay_out` gives them, times a panel; meanwhile those from `next` on come.
  void multiply(int64_t first, int64_t p, const T* x, int64_t next) const {
    const int64_t column = p * panel, count = rows - first < tile_rows ? rows - first : tile_rows;
    T* z = static_cast<T*>(o.z) + first * columns + column;
    if (!stream)
      for (int r = 0; r < count; ++r) fetch_for_writing(z + r * columns);
    Lane sum[tile_rows][2] = {};
    const T* w = packed(p);
    int64_t k = 0;
    if (is_laid_out(first)) {
      for (; k + depth <= terms; k += depth, x += tile_rows * depth, w += panel * depth) {
        fetch_share(next, p, k);
        add<depth>(x, 0, w, depth, sum);
      }
    }
    add<0>(x, terms - k, w, terms - k, sum);
    if (count < tile_rows || column + panel > columns) put_some(z, count, columns - column, sum);
    else if (stream) put(z, sum, stream_store);
    else put(z, sum, [](T* to, Lane values) { *(UnalignedLane*)to = values; });
  }

  // A panel of a row, which comes while its sums are made.
  EQ_FN static void fetch_for_writing(const T* row) {
    for (int u = 0; u < panel; u += 64 / int(sizeof(T))) __builtin_prefetch(row + u, 1, 3);
  }
  // Sums go from registers to their places: in a loop that is not unrolled they would be in memory all the time.
  template <class Store>
  EQ_FN void put(T* z, const Lane (&sum)[tile_rows][2], const Store& store) const {
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r, z += columns) {
      store(z, sum[r][0]);
      store(z + lanes, sum[r][1]);
    }
  }
  // Those of the first `count` rows, and of no more columns than are left.
  EQ_FN void put_some(T* z, int64_t count, int64_t left, const Lane (&sum)[tile_rows][2]) const {
    T all[tile_rows][panel];
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
      *(UnalignedLane*)all[r] = sum[r][0];
      *(UnalignedLane*)(all[r] + lanes) = sum[r][1];
    }
    for (int64_t r = 0; r < count; ++r) memcpy(z + r * columns, all[r], (left < panel ? left : panel) * sizeof(T));
  }
};

void launch_product(const eq_operands& o, const int32_t* summands) {
  const Product product{o, summands};
  const int tiles = product.tiles_of_block();
  const int64_t block = int64_t(tiles) * tile_rows;
  const Scratch laid_out(tiles * product.tile_size(), o.threads);
  const int64_t taken = taken_at_a_time((product.rows + block - 1) / block, o.threads);
#pragma omp parallel num_threads(o.threads)
  {
#pragma omp for schedule(static)
    for (int64_t p = 0; p < product.panels; ++p) product.pack(p);
    T* x = laid_out.own();
#pragma omp for schedule(dynamic, taken)
    for (int64_t first = 0; first < product.rows; first += block) {
      const int64_t left = (product.rows - first + tile_rows - 1) / tile_rows;
      const int count = left < tiles ? int(left) : tiles;
      const T* tile[most_tiles];
      for (int t = 0; t < count; ++t) tile[t] = product.lay_out(first + t * tile_rows, x + t * product.tile_size());
      for (int64_t p = 0; p < product.panels; ++p)
        for (int64_t t = 0, row = first; t < count; ++t, row += tile_rows)
          product.multiply(row, p, tile[t], row + block);
    }
    finish_streams();
  }
}

}  // namespace

// `eq_launch_shared`: `summands` says of which rows of x a row is the sum; num_edges are the rows of z then.
#define EQ_EXPORT_PRODUCT()                                                                                            \
  extern "C" __attribute__((visibility("default"))) void eq_launch_shared(const eq_operands* o,                        \
                                                                          const int32_t* summands) {                   \
    launch_product(*o, summands);                                                                                      \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    eq_launch_shared(o, nullptr);                                                                                      \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    const Product product{*o, nullptr};                                                                                \
    return product.panels * panel * product.terms * sizeof(T);                                                         \
  }
