// The structures that generated kernels take, on every backend.
//
// Plain C, no includes but <stdint.h>: the code generator puts this text in front of each generated source, and the
// runtime includes it (csrc/runtime/abi.h), so that the two can not disagree. All rows are contiguous; `w` and `c` may
// repeat one row (stride 0). Both do or neither, of a payload with the number "sums_weights": then a kernel for a CPU
// gives the sum of gradients of a batch, one row. Pointers that a direction does not use are null.
#pragma once

// Raised with every change of what the runtime hands to kernels or expects of them: kernels are kept in exported files.
#define EQ_ABI 18
#if !defined(__CUDACC_RTC__) && !defined(__HIPCC_RTC__)
#include <stdint.h>
#else
typedef int int32_t;
typedef long long int64_t;
#endif

// Numbers of a spec, in families of which one kernel for the CPU serves all specs; the family says what they mean.
struct eq_tables {
  const int64_t* integers;
  const double* reals;
};

struct eq_operands {
  const void* x;   // (num_senders, x_dim) features of the sending nodes
  const void* y;   // (num_edges, y_dim) edge attributes
  const void* w;   // (num_edges, w_dim) path weights, rows `w_stride` elements apart
  const void* gz;  // (num_receivers, z_dim) gradient of the output: from backward on
  const void* a;   // tangents of x, y and w: from double backward on
  const void* b;
  const void* c;  // of polynomials and radial functions null for none
  void* z;   // (num_receivers, z_dim) forward: output; from double backward on: gradient with respect to gz
  void* gx;  // gradients of x, y and w: from backward on
  void* gy;
  void* gw;
  void* workspace;
  // Edges sorted by receiver, then sender; a "slot" is a position in that order. All null for a batch, where row n of
  // every operand belongs to row n of the output.
  const int32_t* row_ptr;    // (num_receivers + 1) first slot of each receiver
  const int32_t* edge;       // (num_edges) edge held by a slot
  const int32_t* sender;     // (num_edges) sender of the edge in a slot
  const int32_t* t_row_ptr;  // (num_senders + 1) first entry of t_slot of each sender
  const int32_t* t_slot;     // (num_edges) slots ordered by sender
  int64_t num_receivers;
  int64_t num_senders;
  int64_t num_edges;
  int64_t w_stride;
  int64_t c_stride;
  int32_t mul_ir;         // 1: rows like x and like z are laid out (mul, 2l+1) inside a block; 0: (2l+1, mul)
  int32_t deterministic;  // 1: gx in a fixed order; 0: by atomic addition
  int32_t threads;        // CPU threads
  // Of triple backward alone: other tangents of x, y, w and gz, and gradients of a, b and c. Rows of r may repeat.
  const void* p;
  const void* q;
  const void* r;
  const void* g;
  void* ga;
  void* gb;
  void* gc;
  int64_t r_stride;
  const struct eq_tables* tables;  // null where the numbers of the spec are in the text of the kernel
};

// What only kernels of GPUs take: which edges share rows of weights, and how the slots of a graph, or the rows of a batch,
// are dealt out to blocks: a row to each, or so many slots. Rows of more than `longest` slots are cut at multiples of
// `cut` and the others are not: a share of slots that would begin inside such a row begins with it. Where a row has a
// block, the parts after the first have blocks of their own.
struct eq_work_split {
  int32_t first, last;  // slots of this launch; the workspace has gradients of x for these, from `first` on
  int32_t size;         // slots of a block, which divides `cut`; 0: a row
  int32_t longest, cut;
  void* partials;  // sums of the parts of rows, two rows for each multiple of `cut`
  // (num_edges) row of the weights of an edge, of a graph whose slots are its edges; null if that is the edge's own.
  const int32_t* w_row;
};
// Elements of a row that a GPU thread moves or adds: up to 16 bytes.
#define EQ_ROW_WIDTH(dim, scalar_bytes) ((dim) % 4 == 0 && (scalar_bytes) == 4 ? 4 : (dim) % 2 == 0 ? 2 : 1)
