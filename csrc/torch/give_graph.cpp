// eqaccel::give_graph and eqaccel::take_graph back: a graph that Python gives to the programs that it runs (given_graph.h).
#include <torch/library.h>

#include <memory>
#include <tuple>
#include <vector>

#include "given_graph.h"

namespace eqaccel::ops {
namespace {

thread_local std::vector<std::unique_ptr<GivenGraph>> given;

int64_t give_graph(const Tensor& edge_index, const Tensor& graph, int64_t num_nodes, bool compare, at::TensorList pairs,
                   int64_t key, double gradient_bytes) {
  constexpr std::size_t parts = 4;
  TORCH_CHECK(pairs.empty() || pairs.size() == parts,
              "eqaccel::give_graph: argument 'pairs' must be row, edges, differ ", "and payload, or empty, got ",
              pairs.size(), " tensors.");
  GivenGraph::FindPairs find;
  if (!pairs.empty()) {
    const EdgePairs found{pairs[0], pairs[1], pairs[2], pairs[3], key};
    find = [found] { return found; };
  }
  given.push_back(std::make_unique<GivenGraph>(edge_index, graph, num_nodes, compare, find, gradient_bytes));
  return static_cast<int64_t>(given.size());
}

std::tuple<bool, bool, bool> take_graph(int64_t number) {
  TORCH_CHECK(number > 0 && number == static_cast<int64_t>(given.size()),
              "eqaccel::take_graph: expected the graph that ", "this thread was given last, number ", given.size(),
              ", got number ", number, ".");
  const std::unique_ptr<GivenGraph> last = std::move(given.back());
  given.pop_back();
  return {last->differed(), last->values_differed(), last->shares()};
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeExplicitAutograd, library) {
  library.impl("give_graph", give_graph);
  library.impl("take_graph", take_graph);
}

}  // namespace
}  // namespace eqaccel::ops
