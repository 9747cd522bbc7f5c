// Schemas of torch.ops.eqaccel.
//
// payload: uint8, read only when `key` is new to the process. x: (S, x_dim); y: (E, y_dim); w: (E, w_dim), or one row
// for all edges as (w_dim,) or (1, w_dim); z: (num_receivers, z_dim). An empty graph means a batch: S = E =
// num_receivers, and row n goes with row n.
#include <torch/library.h>

#include "portions.h"

#define EQ_PORTIONS "__torch__.torch.classes.eqaccel.Portions"
#define EQ_PROBLEM_ARGUMENTS "Tensor graph, SymInt num_receivers, int z_dim, bool mul_ir, bool deterministic"

TORCH_LIBRARY(eqaccel, library) {
  eqaccel::ops::register_portions();
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def("graph(Tensor receiver, Tensor sender, SymInt num_receivers, SymInt num_senders) -> Tensor", tags);
  // The edges that some nodes of a packed index receive, of whose nodes all send and receive: an index in which edges
  // are numbered from the first, with room for `capacity` of them; their slots; and how many they are.
  library.def("graph_rows(Tensor graph, int num_nodes, int row_begin, int row_end, int capacity) -> "
              "(Tensor index, Tensor slots, Tensor num_edges)");
  // Pairs of edges and their reverses as edge_pairs or neighbor_pairs give them, of a packed index in which slots are edges,
  // in ranges of `size` pairs with all of their edges, which are numbered from the first. Four tensors for each: int64 slots
  // of the edges, the pair of each, the edges of each pair, and a packed index. Where every edge has a reverse there may
  // be room behind the last edge, which the last ranges have; else there is none, and a GPU is waited for.
  library.def("pair_ranges(Tensor graph, Tensor row, Tensor edges, int num_nodes, int size, bool all_reversible) -> "
              "Tensor[]");
  library.def("tensor_product(Tensor payload, int key, Tensor x, Tensor y, Tensor w, " EQ_PROBLEM_ARGUMENTS
              ") -> Tensor",
              tags);
  library.def(
      "tensor_product_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor y, Tensor w, " EQ_PROBLEM_ARGUMENTS
      ") -> (Tensor gx, Tensor gy, Tensor gw)",
      tags);
  library.def("tensor_product_double_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor y, Tensor w, "
              "Tensor a, Tensor b, Tensor c, " EQ_PROBLEM_ARGUMENTS
              ") -> (Tensor ggz, Tensor gx, Tensor gy, Tensor gw)",
              tags);
  library.def("tensor_product_triple_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor y, Tensor w, "
              "Tensor a, Tensor b, Tensor c, Tensor g, Tensor p, Tensor q, Tensor r, " EQ_PROBLEM_ARGUMENTS
              ") -> (Tensor ggz, Tensor gx, Tensor gy, Tensor gw, Tensor ga, Tensor gb, Tensor gc)",
              tags);
  // Edges that share rows of weights, without derivatives: edge_pairs.cpp. w: (rows, w_dim); w_row: (E,) int32, the row of
  // each edge; gw: (E, w_dim), of each edge for itself. On GPUs slots have to be edges, and rows are not checked.
  library.def("tensor_product_shared(Tensor payload, int key, Tensor x, Tensor y, Tensor w, Tensor w_row, "
              "Tensor graph, int num_receivers, int z_dim, bool mul_ir, bool deterministic) -> Tensor");
  library.def("tensor_product_shared_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor y, Tensor w, "
              "Tensor w_row, Tensor graph, int num_receivers, int z_dim, bool mul_ir, bool deterministic) -> "
              "(Tensor gx, Tensor gy, Tensor gw)");
  // summands: (rows, 2) int32; row r of the result is (a[summands[r, 0]] + a[summands[r, 1]]) b. The second is -1 for
  // none, and -2 where the result is zero, for b that is finite.
  library.def("matrix_product_shared(Tensor payload, int key, Tensor a, Tensor b, Tensor summands) -> Tensor");
  // The same for pairs: `edges` as edge_pairs or neighbor_pairs give them, payload and key of `neighbors`, any on a CPU.
  library.def("multiply_pairs(Tensor payload, int key, Tensor product_payload, int product_key, Tensor values, "
              "Tensor matrix, Tensor edges) -> Tensor");
  // A convolution over the graph of `portions` with the weights of pairs, which are the product of hidden (pairs, terms) and
  // matrix (terms, w_dim); differentiated once, and not by the matrix.
  library.def(
      "shared_convolution(Tensor payload, int key, Tensor product_payload, int product_key, Tensor x, Tensor y, "
      "Tensor hidden, Tensor matrix, " EQ_PORTIONS " portions, int z_dim, bool mul_ir, bool deterministic) -> "
      "Tensor");
  library.def("edge_pairs(Tensor vectors, Tensor graph, int num_nodes) -> (Tensor row, Tensor edges)");
  // Values of edges (E, columns), once a pair: of the edge that comes first. Sets `differ`, (1,) float64, to one if those
  // of the other edge of any pair are not the same. And the transpose of that. payload: of `neighbors`, any on a CPU.
  library.def(
      "take_pairs(Tensor payload, int key, Tensor values, Tensor row, Tensor edges, Tensor(a!) differ) -> Tensor");
  library.def("spread_pairs(Tensor payload, int key, Tensor rows, Tensor row, Tensor edges) -> Tensor");
  // a: (rows, terms); b: (terms, columns); payload and key: of the kernel, see matrix_product.cpp.
  library.def("matrix_product(Tensor payload, int key, Tensor a, Tensor b) -> Tensor", tags);
  // For exported programs, weighted_convolution.cpp. values: (E, columns), of which gradients see lengths alone; rows of
  // such values, once for an edge and its reverse, or the values as they are. hidden: (E, terms), or of such rows; matrix:
  // (terms, w_dim).
  library.def("of_lengths(Tensor(a) values) -> Tensor(a)", tags);
  // For who runs such programs: what GivenGraph takes, with pairs, or nothing, and what weights that are not shared may
  // take, as Portions::Limits; it holds on this thread until it is taken back, last first. What was found: given_graph.h.
  library.def("give_graph(Tensor edge_index, Tensor graph, int num_nodes, bool compare, " EQ_PORTIONS "? pairs, "
              "float weight_bytes, float gradient_bytes, float besides) -> int");
  library.def("take_graph(int number) -> (bool differed, bool values_differed, bool shares)");
  library.def("once_a_pair(Tensor(a) values) -> Tensor(a)", tags);
  library.def(
      "weighted_convolution(Tensor payload, int key, Tensor product_payload, int product_key, Tensor x, Tensor y, "
      "Tensor hidden, Tensor matrix, Tensor receiver, Tensor sender, int z_dim, bool mul_ir, bool deterministic) "
      "-> Tensor",
      tags);
  // x: (rows, num_features); w: (rows, num_weights), and its tangent c, or (0,) for none; z: (rows, num_outputs), see
  // polynomial.cpp.
  library.def("polynomial(Tensor payload, int key, Tensor x, Tensor w, int num_outputs) -> Tensor", tags);
  library.def("polynomial_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, int num_outputs) -> "
              "(Tensor gx, Tensor gw)",
              tags);
  library.def("polynomial_double_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, Tensor a, Tensor c, "
              "int num_outputs) -> (Tensor ggz, Tensor gx, Tensor gw)",
              tags);
  // polynomial.h; four of gz, w and three features, without the one that is missing.
  library.def("polynomial_polar_form(Tensor payload, int key, Tensor f, Tensor g, Tensor h, Tensor i, int missing, "
              "SymInt columns) -> Tensor",
              tags);
  // neighbors.cpp; positions: (N, 3), cells: (structures, 3, 3), candidates as runtime/neighbors.h has them. All reversible:
  // each has its reverse among them.
  library.def(
      "neighbors(Tensor payload, int key, Tensor positions, Tensor cells, Tensor structure, Tensor ptr, "
      "Tensor sender, Tensor shift, Tensor t_ptr, Tensor t_order, float cutoff, int spare, int capacity, ScalarType dtype, "
      "bool all_reversible=True) -> (Tensor vectors, Tensor edge_index, Tensor graph, Tensor num_edges)");
  // Pairs of edges and their reverses on a GPU, of the graph of `neighbors`, with -2 for the second edge beyond the last
  // pair, and (1,) float64 zero for `take_pairs`. Unless all are reversible, edges from nodes that receive nothing are
  // alone, with -1 for the second edge, and there are no rows beyond the last pair, for which the device is waited for. And
  // sums of the rows of a matrix that pairs have; or of some of its rows, those of edges from `first` on, one portion after
  // another: rows of sums are written where the first of their edges is, and added to where the second is.
  library.def("neighbor_pairs(Tensor payload, int key, Tensor vectors, Tensor graph, int num_atoms, int num_nodes, "
              "bool all_reversible=True) -> (Tensor row, Tensor edges, Tensor differ)");
  library.def("add_pairs(Tensor payload, int key, Tensor matrix, Tensor edges) -> Tensor");
  library.def("add_some_pairs(Tensor payload, int key, Tensor matrix, int first, Tensor row, Tensor edges, "
              "Tensor(a!) sums) -> ()");
  library.def("edge_forces(Tensor payload, int key, Tensor vectors, Tensor gradient, Tensor graph, int num_nodes) -> "
              "(Tensor forces, Tensor virials)");
  // Lengths x: (rows, 1); frequencies w: (num_basis,), of all rows; z: (rows, num_basis), or (rows, 1) if there are none;
  // tangent c of w: (num_basis,), or (0,) for none. of_w: whether gw is wanted; otherwise it is (0,). The numbers at
  // the end are those of the payload: see radial_basis.h.
#define EQ_RADIAL_ARGUMENTS "float factor, float r_max, float unit, int power"
  library.def("radial_basis(Tensor payload, int key, Tensor x, Tensor w, " EQ_RADIAL_ARGUMENTS ") -> Tensor", tags);
  library.def("radial_basis_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, " EQ_RADIAL_ARGUMENTS
              ", bool of_w) -> (Tensor gx, Tensor gw)",
              tags);
  library.def("radial_basis_double_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, Tensor a, "
              "Tensor c, " EQ_RADIAL_ARGUMENTS ", bool of_w) -> (Tensor ggz, Tensor gx, Tensor gw)",
              tags);
  // x, z and gradients: of any shape, the same for all. Factor and scale are those of the payload.
  library.def("silu(Tensor payload, int key, Tensor x, float factor, float scale) -> Tensor", tags);
  library.def("silu_backward(Tensor payload, int key, Tensor gz, Tensor x, float factor, float scale) -> Tensor", tags);
  library.def("silu_double_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor a, float factor, "
              "float scale) -> (Tensor ggz, Tensor gx)",
              tags);
  // gate.cpp; x: (rows, x_dim), z: (rows, z_dim). `parts` is GateSpec.text() of the payload's spec.
  library.def("gate(Tensor payload, int key, Tensor x, str parts) -> Tensor", tags);
  library.def("gate_backward(Tensor payload, int key, Tensor gz, Tensor x, str parts) -> Tensor", tags);
  library.def("gate_double_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor a, str parts) -> "
              "(Tensor ggz, Tensor gx)",
              tags);
  // radial_layer.cpp; x: (rows, inputs), w: (inputs, outputs). Factor and scale are those of the payload.
  library.def("radial_layer(Tensor payload, int key, Tensor x, Tensor w, float factor, float scale) -> Tensor", tags);
  library.def("radial_layer_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, float factor, "
              "float scale) -> Tensor",
              tags);
  // radial_network.cpp; w: the weights of all layers, one after the other. Widths, factors and scales are those of the
  // payload.
  library.def("radial_network(Tensor payload, int key, Tensor x, Tensor w, int[] widths, float[] factors, "
              "float[] scales) -> Tensor",
              tags);
  library.def("radial_network_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, int[] widths, "
              "float[] factors, float[] scales) -> Tensor",
              tags);
  // linear.h; three of x: (rows, x_dim), y: (rows, y_dim), w: (w_dim,) and gz: (rows, z_dim), without the one that is
  // missing, which the result, of so many columns, belongs to.
  library.def("linear(Tensor payload, int key, Tensor f, Tensor g, Tensor h, int missing, int columns) -> Tensor",
              tags);
  // unit_vectors.cpp; x: (rows, columns). Rows of length one and lengths (rows, 1); and two results without derivatives,
  // for those of the first two: the rows of length one, but zeros for those that are too short to have a direction; and
  // what rows were divided by, their lengths but not below the shortest. gl: (rows, 1), or (0,) for none; `along`, for the
  // derivatives of gx, has none.
  library.def("unit_vectors(Tensor x) -> (Tensor unit, Tensor length, Tensor direction, Tensor divisor)", tags);
  library.def("unit_vectors_backward(Tensor gz, Tensor gl, Tensor x, Tensor direction, Tensor divisor) -> "
              "(Tensor gx, Tensor along)",
              tags);
  // a: (rows, terms), b: (terms, columns); in float32 under autocast, where torch.mm rounds both to 16 bits.
  library.def("dense_product(Tensor a, Tensor b) -> Tensor", tags);
  // x: (rows, columns). Column n of the result is column order[n] of x; `inverse` is the inverse of that permutation.
  library.def("permute_columns(Tensor x, Tensor order, Tensor inverse) -> Tensor", tags);
  // take_rows.cpp; x: (rows, columns); numbers: int64. Rows of x by their numbers, x[numbers], for which `order` (int32 or
  // int64) sorts the numbers, and row n begins at starts[n] in it; and a column of each row, x[rows, columns], where `rows`
  // counts the rows from zero.
  library.def("take_rows(Tensor x, Tensor numbers, Tensor order, Tensor starts) -> Tensor", tags);
  library.def("take_columns(Tensor x, Tensor rows, Tensor columns) -> Tensor", tags);
  // Row n of the result is the sum of the rows of `values` (rows, columns) whose number is n, in one order: the given one,
  // or that of the edges of a given graph, or that of the rows. `order` and `starts` as above, both or none; sort_rows
  // gives those of any numbers.
  library.def("add_rows(Tensor values, Tensor numbers, SymInt num_rows, Tensor? order=None, Tensor? starts=None) -> "
              "Tensor",
              tags);
  library.def("sort_rows(Tensor numbers, SymInt num_rows) -> (Tensor order, Tensor starts)", tags);
  // exchange.h; x: (num_local, width), gradient: (num_nodes, width). Handle 0: no ghosts, the result is a copy.
  // "Conservative" keeps TorchScript from leaving out a call whose result is not used, on one rank of many.
  for (const char* schema : {"exchange(Tensor x, int handle, SymInt num_nodes) -> Tensor",
                             "exchange_backward(Tensor gradient, int handle, SymInt num_local) -> Tensor"})
    library.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE), tags);
}
