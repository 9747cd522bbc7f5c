// An exported model as a simulation program sees it. Plain C++: a program's plugin includes this file and opens
// libeqaccel_model when a model is asked for, so that it neither links nor loads torch before.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace eqaccel {

class GhostExchange;

// What the model file says about itself.
struct ModelInfo {
  double cutoff = 0;                     // angstrom
  std::vector<std::string> type_names;   // a type of a node is an index into these
  std::vector<int64_t> exchange_widths;  // columns of every exchange, in the order of the forward pass
  bool is_double = false;                // dtype of the rows that are exchanged, and of all arithmetic
  std::string device;                    // where it runs: "cpu", "cuda:1"
};

// The atoms of one rank as a graph.
struct Frame {
  int64_t num_local = 0;               // nodes whose energies are asked for: they come first
  int64_t num_nodes = 0;               // with ghosts
  int64_t num_edges = 0;
  const int64_t* types = nullptr;      // (num_nodes)
  const int64_t* senders = nullptr;    // (num_edges)
  const int64_t* receivers = nullptr;  // (num_edges), local
  const double* vectors = nullptr;     // (num_edges, 3): r_receiver - r_sender in angstrom
};

// Pairs of atoms of one rank that may be within the cutoff for some steps. A pair is between an atom and an image: an atom
// itself, or where a sum of cell vectors takes it. Ghosts of other ranks are atoms too, one for all images of an atom.
struct Candidates {
  int64_t num_local = 0;               // atoms whose energies are asked for: they come first
  int64_t num_atoms = 0;               // with ghosts
  int64_t num_images = 0;
  int64_t num_pairs = 0;
  const int32_t* owners = nullptr;     // (num_images) the atom that an image is of
  const int32_t* shifts = nullptr;     // (num_images, 3) cell vectors from the atom to the image
  const int32_t* receivers = nullptr;  // (num_pairs) local atoms; pairs come in any order
  const int32_t* senders = nullptr;    // (num_pairs) images
};

// The atoms in one step, in the order of the candidates.
struct Atoms {
  const double* positions = nullptr;  // (num_atoms, 3) angstrom
  const double* cell = nullptr;       // (3, 3), a cell vector in each row; any where no candidate crosses its walls
  const int64_t* types = nullptr;     // (num_atoms)
};

struct StepResult {
  std::vector<double> energies;  // (num_local) eV
  std::vector<double> forces;    // (num_atoms, 3) eV/angstrom, of the energies of the local atoms of all ranks
  double virial[9] = {};         // derivative of the energy in the strain, symmetric, (3, 3) eV
  double nearest = 0;            // angstrom; how near two atoms come, rounded as the model's dtype
  std::string obstacle;          // why these are no results, which may be on several ranks; the next step has some
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;

  // Why the model takes no candidates; empty if it does.
  virtual std::string cannot_step() const = 0;
  // Takes candidates to its device, for the steps until the next call; those between local atoms also serve the other way
  // round.
  virtual void keep(const Candidates&) = 0;
  // Picks the edges out of the candidates, and evaluates the model on them, all on its device. Positions and cell are
  // finite. `exchange` fills ghosts, on the calling thread; null on one rank. There, on a GPU that can, steps are recorded
  // as a CUDA graph, and recorded again when atoms or edges do not fit.
  virtual void step(const Atoms&, GhostExchange* exchange, StepResult&) = 0;
  // What there is to say of the steps so far: what was recorded how often and why, or why nothing is.
  virtual std::string steps_note() const = 0;

  // Fills `energies` (num_local) in eV and `gradients` (num_edges, 3), the derivative of their sum by `vectors`, in
  // eV/angstrom. `exchange` fills ghosts, on the calling thread; null if num_nodes == num_local.
  // With `moments` (num_edges, 3, 3), which may be null, also those of the gradients about the receivers, in eV: the
  // sums of (r_m - r_receiver) times the derivative of the energy of node m by the vector, over all local nodes m of
  // all ranks. They take three more backward passes, in each of which every exchange of ghosts goes back once more.
  virtual void evaluate(const Frame&, GhostExchange* exchange, double* energies, double* gradients,
                        double* moments) = 0;
  // How often every exchange goes back in an evaluation with moments.
  static constexpr int moment_passes = 4;
};

struct ModelOptions {
  const char* path = "";
  // "cpu", "cuda:1", "cuda": the rank's share of the GPUs of its host; or "auto": that, if torch sees a GPU, else "cpu".
  const char* device = "auto";
  int local_rank = 0;          // number of this rank on its host
  int threads = 1;             // of this rank on a CPU
  // Whether to open a file that holds kernels in machine code. Without them the kernels are compiled here, from the
  // source text that every file holds: open files from people whom you trust with that too.
  bool allow_native_code = true;
};

}  // namespace eqaccel

// The caller deletes the model. Every failure, here and in evaluate, is a std::runtime_error of one line. A change of
// this file that breaks older plugins gets a new number.
extern "C" eqaccel::Model* eqaccel_load_model_5(const eqaccel::ModelOptions* options);
