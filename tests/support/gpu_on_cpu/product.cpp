// Runs the kernel of matrix products by mma.sync on a CPU: `product ROWS TERMS COLUMNS BLOCKS TRANSPOSED`
// prints the largest error over the sum of absolute values, and how many numbers around the result have changed.
// "body.h" is the body, and `parts` and `shared_bytes` are given by the compiler's command line.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "mma_product.h"

#include "body.h"

namespace {

std::vector<float> random_numbers(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

int64_t padded(int64_t count, int64_t size) { return (count + size - 1) / size * size; }

}  // namespace

int main(int, char** arguments) {
  const long long rows = std::atoll(arguments[1]);
  const int terms = std::atoi(arguments[2]), columns = std::atoi(arguments[3]), blocks = std::atoi(arguments[4]);
  const bool transposed = std::atoi(arguments[5]) != 0;
  const long long row_stride = transposed ? 1 : columns, column_stride = transposed ? terms : 1;
  const std::vector<float> a = random_numbers(rows * terms, 1), b = random_numbers(std::size_t(terms) * columns, 2);
  constexpr int margin = 512;
  const float untouched = 1e30f;
  std::vector<float> c(rows * columns + 2 * margin, untouched);
  const int64_t padded_columns = padded(columns, Problem::width);
  std::vector<float> packed(Problem::parts * padded_columns * padded(terms, Problem::depth) / 2 + padded_columns,
                            untouched);
  static_assert(SHARED_BYTES <= sizeof(shared_memory));

  constexpr unsigned warps_of_column = 2, columns_of_block = 3;
  launch(
      unsigned(padded(padded_columns, columns_of_block) / columns_of_block), warps_of_column * lanes_of_warp,
      [&] { eq_pack(b.data(), packed.data(), columns, terms, row_stride, column_stride, Problem::width); },
      columns_of_block);
  launch(unsigned(blocks), Problem::block_threads,
         [&] { eq_product_0(a.data(), packed.data(), c.data() + margin, rows, columns, terms, nullptr, 1); });

  double worst = 0;
  for (long long row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      double exact = 0, size = 0;
      for (int k = 0; k < terms; ++k) {
        const double term = double(a[row * terms + k]) * b[k * row_stride + column * column_stride];
        exact += term, size += std::abs(term);
      }
      const double error = std::abs(c[margin + row * columns + column] - exact) / size;
      worst = error <= worst ? worst : error;  // NaN too
      if (std::isnan(error)) worst = error;
    }
  int changed = 0;
  for (int n = 0; n < margin; ++n) changed += (c[n] != untouched) + (c[c.size() - 1 - n] != untouched);
  for (std::size_t n = SHARED_BYTES / sizeof(float); n < std::size(shared_memory); ++n)
    changed += !std::isnan(shared_memory[n]);
  std::printf("error %.9g\nchanged %d\n", worst, changed);
}
