// SPDX-License-Identifier: GPL-2.0-only
//
// pair_style eqaccel [device auto|cpu|cuda|cuda:N] [threads auto|N] [native_code yes|no] [lists auto|device|host]
// pair_coeff * * model.pt element1 element2 ...
#ifndef LMP_PAIR_EQACCEL_H
#define LMP_PAIR_EQACCEL_H

#include "eqaccel/model.h"
#include "kept_steps.h"
#include "missing_neighbors.h"
#include "pair.h"
#include "rank_edges.h"
#include "rank_nodes.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace LAMMPS_NS
{

class PairEqaccel : public Pair
{
 public:
  PairEqaccel(class LAMMPS *);
  ~PairEqaccel() override;

  void settings(int, char **) override;
  void coeff(int, char **) override;
  void init_style() override;
  double init_one(int, int) override;
  void compute(int, int) override;
  double memory_usage() override;
  void finish() override;

  int pack_forward_comm(int, int *, double *, int, int *) override;
  void unpack_forward_comm(int, int, double *) override;

 private:
  using Loader = eqaccel::Model *(*)(const eqaccel::ModelOptions *);

  void open_library();
  int local_rank(int &ranks_on_host) const;
  static int share_of_processors(int ranks_on_host);
  std::string name(int atom) const;

  void warn_of_exclusions() const;
  void warn_of_heat_flux() const;
  void choose_way();

  // A step in parts. Those that return a string say what is wrong, or nothing.
  bool compute_on_kept_lists();
  bool all_leave(const std::string &reason);
  void run_model(const std::function<void()> &work);
  std::string check_positions() const;
  std::string collect_edges();
  void evaluate();
  std::string check_results() const;
  void add_results();
  void add_centroid_virial(size_t edge, const double push[3]);
  void add_kept_results();
  // Collective: if any rank has a message, a trial move is rejected (true), and else all ranks stop with the first one.
  bool rejects(const std::string &message);
  bool is_trial_move() const;
  // Collective: if any rank has a message, all ranks stop with that of the first.
  void stop_if_any(const std::string &message);
  int first_rank_with(const std::string &message) const;

  Loader load_model = nullptr;
  std::string device = "auto";
  int threads = 0;    // 0: auto
  bool native_code = true;
  std::string lists = "auto";
  std::unique_ptr<eqaccel::Model> model;
  std::vector<int> element_of_type;    // index into the model's type names, -1: left to another sub-style
  double energy_unit = 1.0;            // an eV in the energy unit of the simulation

  RankNodes nodes;
  MissingNeighbors missing;
  KeptSteps kept;
  RankEdges edges;
  bool keeps_lists = false;    // whether lists stay on the device, as far as a step lets them
  std::string way;             // in words
  bool is_set_up = false;      // whether LAMMPS has asked this model for its cutoff and its list
  bool owners_known = false;
  std::vector<char> takes_part;    // of every atom: whether it has an element and is not taken out of the system

  // of the nodes and edges of this step
  std::vector<int64_t> types;
  std::vector<double> energies, gradients, moments;
};

}    // namespace LAMMPS_NS

#endif
