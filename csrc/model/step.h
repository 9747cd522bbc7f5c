// A simulation step on the device of a model: edges out of candidates that are kept there, energies, forces and the
// virial, and on a GPU all of it recorded, where there is one rank. What eqaccel/step/engine.py is to programs in Python.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "candidate_tensors.h"
#include "eqaccel/model.h"
#include "graph_capture.h"
#include "portions.h"

namespace eqaccel {

// What weights of edges may take on a device.
ops::WeightLimits limits_on(c10::Device);

class Step {
 public:
  struct Setup {
    // Vectors, edge index, types, number of local nodes and exchange; to energies of these and the gradient of their sum.
    std::function<std::pair<at::Tensor, at::Tensor>(at::Tensor, at::Tensor, at::Tensor, int64_t, GhostExchange*)>
        potential;
    at::Tensor search;  // payload of the kernels that find edges; any on a CPU
    int64_t search_key = 0;
    double cutoff = 0;
    at::ScalarType dtype = at::kDouble;
    c10::Device device = c10::kCPU;
  };

  explicit Step(Setup);

  // As those of Model.
  void keep(const Candidates&);
  void run(const Atoms&, GhostExchange*, StepResult&);
  std::string note() const;

 private:
  // Tensors that stay where they are while positions, cell, types and candidates change.
  struct Memory {
    int64_t local, atoms;  // the local ones come first
    int64_t spare;  // nodes behind the atoms, for edges beyond the last; none on a CPU
    at::Tensor staged, moved;  // cell, positions and types as one piece of memory, on the host and on the device
    at::Tensor cell, positions, types;
    CandidateTensors candidates;
    int64_t capacity = 0;  // room for edges; not used on a CPU
    at::Tensor zero;  // (1,) float64
    at::Tensor results;  // on the host

    Memory(const CandidateTensors&, int64_t local, c10::Device);
    // Sends positions and cell, and types if there are others. Returns how many bytes that are.
    int64_t move(const Atoms&);
    bool takes(const Candidates& given) const { return atoms == given.num_atoms && local == given.num_local; }
    int64_t nodes() const { return atoms + spare; }
    bool all_reversible() const { return local == atoms; }  // no ghosts, which only send

   private:
    bool has_types_ = false;
  };
  struct Edges {
    at::Tensor vectors, edge_index, graph, count;
  };

  bool on_gpu() const { return !setup_.device.is_cpu(); }
  Edges search(int64_t capacity) const;
  Edges search_exactly() const;  // without room for further edges, and so none that is only room
  ops::EdgePairs find_pairs(const Edges&) const;
  // From positions to one vector of doubles: number of edges, length of the shortest, whether an edge and its reverse
  // shared weights that are not the same, energies, forces, virial.
  at::Tensor evaluate(const Edges&, bool compare, GhostExchange* exchange = nullptr);
  // What ranks evaluate together: nothing is recorded or done twice.
  at::Tensor run_with(GhostExchange*);
  // `run_once`; with less memory for weights, if a GPU has no more.
  at::Tensor run_within_memory();
  at::Tensor run_once();
  void record();
  // Throws unless recorded results are those without room for further edges, but for rounding.
  void verify(const at::Tensor& recorded, const at::Tensor& exact) const;
  const double* fetch(const at::Tensor& results);
  // Whether these are results; if not, makes sure that the next ones can be.
  bool accept(const double* values);
  // Whether no edges shared weights that are not the same; if some did, none share from now on.
  bool shared_the_same(const double* values);
  void make_room(const std::string& reason, int64_t num_edges);
  void forget_recording();
  // Whether there was no memory, and weights may take less of it.
  bool may_take_less(const std::exception&) const;

  const Setup setup_;
  std::optional<c10::Stream> stream_;  // of all work on a GPU, because the default one can not be recorded
  ops::WeightLimits limits_;
  std::unique_ptr<Memory> memory_;
  bool is_new_ = false;  // whether candidates have not served yet
  bool compared_ = false;  // whether the edges of every layer were compared with those that are sorted
  bool may_share_ = true;  // and were the same
  bool may_share_weights_ = true;  // as far as known, an edge and its reverse have the same ones
  bool shares_weights_ = false;  // whether they were made once for both

  std::unique_ptr<GraphCapture> capture_;
  at::Tensor recorded_;  // what a replay writes to
  std::string reason_;  // why there is no recording yet
  std::string not_recorded_;  // why there never will be one
  std::map<std::string, int64_t> recordings_;  // how often, by the reason
  int64_t age_ = 0;  // evaluations since memory was made
  int64_t patience_ = 1;  // recording waits for so many
  int64_t replays_ = 0;  // of the last recording
  int64_t lists_ = 0, steps_ = 0;
  int64_t sent_bytes_ = 0, sent_atoms_ = 0;  // in steps, from the host
};

}  // namespace eqaccel
