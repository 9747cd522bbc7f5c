// Edges and their reverses, and rows of values that they share.
#pragma once
#include "operators.h"

namespace eqaccel::ops {

struct EdgePairs {
  // As eqaccel::edge_pairs gives them: the pair of each edge, and the edges of each pair. No edges where each edge is alone,
  // and its own pair.
  Tensor row, edges;
  Tensor differ;  // (1,) float64: not zero once an edge and its reverse had other values
  Tensor payload;  // of the kernels of eqaccel::neighbors; any on a CPU
  int64_t key;
  bool all_reversible = false;  // whether every edge has a reverse, so that numbers of edges are known without a look

  bool are_alone() const { return !edges.defined(); }
  int64_t size() const { return are_alone() ? row.size(0) : edges.size(0); }
};

// A product of matrices by eqaccel::matrix_product.
struct Product {
  Tensor payload;
  int64_t key;
};

Tensor multiply(const Product&, const Tensor& a, const Tensor& b);
// The same without derivatives, into `c`, which is contiguous and of the shape of the result.
void multiply_into(const Product&, const Tensor& a, const Tensor& b, const Tensor& c);

// Sums of two rows of `a`, or one row, or zeros, as the edges of pairs say: what eqaccel::matrix_product_shared multiplies.
// Nothing is read of a row of `a` that is in none of them.
Tensor sums_of_rows(const Tensor& a, const Tensor& summands);

// Whether eqaccel::matrix_product_shared has a kernel for sums of rows of `a`, which is faster than to add them before.
bool adds_rows(const Product&, const Tensor& a);

// eqaccel::edge_pairs: on a CPU, of any graph whose nodes all send and receive.
EdgePairs find_pairs(const Tensor& vectors, const Tensor& graph, int64_t num_nodes);

// eqaccel::take_pairs: values of edges, once a pair, with derivatives of any order. The flag is set where those of an
// edge and its reverse are not the same.
Tensor take_pairs(const EdgePairs&, const Tensor& values, const Tensor& differ);

// Throws an error of the operator `op` unless the operands are of one set of edges, of which `matrix` has so many rows.
void check_pairs(const char* op, const Tensor& matrix, int64_t rows, const Tensor& row, const Tensor& edges,
                 const Tensor& differ = {});

}  // namespace eqaccel::ops
