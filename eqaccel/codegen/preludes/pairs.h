// Prelude of tensor products of any mode: which pairs of channels are coupled, and what becomes of them.
//
// A pair (u, v) of channels of x and y has t[k] = sum_ij C[i, j, k] x[u, i] y[v, j]. All pairs go through a dense matrix of
// weights to the channels of z, or each has one weight and is a channel of its own, or is added up over u or v.
#pragma once

namespace {

enum PairKind { all_pairs, equal_pairs, ordered_pairs };  // all (u, v); u = v; u < v
enum MixingKind { own_channels, over_v, over_u, dense };

// Where the blocks of a path begin: their numbers among all blocks, and the first of its elements in rows.
struct PathPlace {
  int in1, in2, out, x, y, z, w;
};
// A block of irreps in a row.
struct RowBlock {
  int offset, mul, dim;
};

// The pairs of paths of a shape, v fastest.
template <class S>
struct PairsOf {
  static constexpr bool all = S::pairs_kind == all_pairs, equal = S::pairs_kind == equal_pairs;
  static constexpr int n1 = S::mul1, n2 = S::mul2, count = all ? n1 * n2 : equal ? n1 : n1 * (n1 - 1) / 2;
  // The channels v that a channel u is paired with.
  static EQ_FN int first_v(int u) { return all ? 0 : equal ? u : u + 1; }
  static EQ_FN int end_v(int u) { return equal ? u + 1 : n2; }
  static EQ_FN int at(int u, int v) { return all ? u * n2 + v : equal ? u : u * (2 * n1 - u - 1) / 2 + v - u - 1; }
};

}  // namespace
