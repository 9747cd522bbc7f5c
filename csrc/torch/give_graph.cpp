// eqaccel::give_graph and eqaccel::take_graph back: a graph that Python gives to the programs that it runs (given_graph.h).
#include <torch/library.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "given_graph.h"

namespace eqaccel::ops {
namespace {

thread_local std::vector<std::unique_ptr<GivenGraph>> given;

int64_t give_graph(const Tensor& edge_index, const Tensor& graph, int64_t num_nodes, bool compare,
                   const std::optional<c10::intrusive_ptr<Portions>>& portions, double weight_bytes,
                   double gradient_bytes, double besides) {
  GivenGraph::FindPairs find;
  if (portions) find = [found = *portions] { return found; };
  given.push_back(std::make_unique<GivenGraph>(edge_index, graph, num_nodes, compare, find,
                                               Portions::Limits{weight_bytes, gradient_bytes, besides}));
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
  register_portions();
  library.impl("give_graph", give_graph);
  library.impl("take_graph", take_graph);
}

}  // namespace
}  // namespace eqaccel::ops
