// SPDX-License-Identifier: GPL-2.0-only
#include "pair_eqaccel.h"

#include "atom.h"
#include "comm.h"
#include "error.h"
#include "exclusions.h"
#include "fix.h"
#include "force.h"
#include "memory.h"
#include "modify.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "update.h"
#include "utils.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <thread>
#include <unistd.h>

using namespace LAMMPS_NS;

// Nearer than any two nuclei: a model knows nothing there, and at 0 the direction of an edge is undefined.
static constexpr double overlap = 0.1;    // angstrom

// What LAMMPS's own Monte Carlo fixes give a trial move that they reject without looking at its energy.
static constexpr double rejected_energy = 1e100;

PairEqaccel::PairEqaccel(LAMMPS *lmp) : Pair(lmp), nodes(lmp, this), missing(lmp), kept(lmp), edges(lmp)
{
  single_enable = 0;
  comm_forward = 1;    // the owner of an atom
  restartinfo = 0;    // as for all styles with a potential file: pair_style and pair_coeff are given again
  one_coeff = 1;
  manybody_flag = 1;
  no_virial_fdotr_compute = 1;    // summed over edges instead, which is right in hybrid styles too
  centroidstressflag = CENTROID_AVAIL;
}

PairEqaccel::~PairEqaccel()
{
  if (allocated) {
    memory->destroy(setflag);
    memory->destroy(cutsq);
  }
}

void PairEqaccel::settings(int narg, char **arg)
{
  for (int i = 0; i < narg; i += 2) {
    const std::string key = arg[i];
    if (i + 1 == narg) error->all(FLERR, "pair_style eqaccel: keyword {} needs a value", key);
    const std::string value = arg[i + 1];
    if (key == "device") {
      if (!utils::strmatch(value, "^auto$") && !utils::strmatch(value, "^cpu$") && !utils::strmatch(value, "^cuda$") &&
          !utils::strmatch(value, "^cuda:\\d+$"))
        error->all(FLERR, "pair_style eqaccel: device must be auto, cpu, cuda or cuda:N, got {}", value);
      device = value;
    } else if (key == "threads" && value == "auto") {
      threads = 0;
    } else if (key == "threads") {
      threads = utils::inumeric(FLERR, value, false, lmp);
      const int most = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
      if (threads < 1 || threads > most)
        error->all(FLERR, "pair_style eqaccel: threads must be auto or 1 to {}, the processors of this host, got {}",
                   most, value);
    } else if (key == "native_code") {
      native_code = utils::logical(FLERR, value, false, lmp) != 0;
    } else if (key == "lists") {
      if (value != "auto" && value != "device" && value != "host")
        error->all(FLERR, "pair_style eqaccel: lists must be auto, device or host, got {}", value);
      lists = value;
    } else
      error->all(FLERR, "pair_style eqaccel: unknown keyword {}, expected device, threads, native_code or lists", key);
  }

  open_library();
}

// Whether a name that a library defines means the same in the rest of the program.
static bool is_shared(const char *library, const char *symbol)
{
  void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  const bool same = handle && dlsym(handle, symbol) == dlsym(RTLD_DEFAULT, symbol);
  if (handle) dlclose(handle);
  return same;
}

// torch is loaded here, and not with the plugin: a LAMMPS that never asks for this style starts without it.
void PairEqaccel::open_library()
{
  if (load_model) return;
  std::string failure;
  int flags = RTLD_NOW | RTLD_LOCAL;
#ifdef RTLD_DEEPBIND
  // LAMMPS brings a plain BLAS of its own under the usual names, which torch would call in place of its fast one. So
  // torch looks at its own libraries first; unless that would part it from the streams or the memory of the program.
  if (is_shared("libstdc++.so.6", "_ZSt4cerr") && is_shared("libc.so.6", "malloc")) flags |= RTLD_DEEPBIND;
#endif
  void *library = dlopen(EQACCEL_MODEL_LIBRARY, flags);
  if (library) load_model = reinterpret_cast<Loader>(dlsym(library, "eqaccel_load_model_5"));
  if (!load_model) failure = dlerror();
  stop_if_any(failure.empty() ? failure
                              : "pair_style eqaccel: can not load eqaccel (" + failure +
                                    "). Install it again with the torch that is there, and build the plugin again");
}

void PairEqaccel::coeff(int narg, char **arg)
{
  const int ntypes = atom->ntypes;
  if (narg < 3 || strcmp(arg[0], "*") != 0 || strcmp(arg[1], "*") != 0)
    error->all(FLERR, "pair_coeff of eqaccel must read: pair_coeff * * model.pt element1 element2 ...");
  if (narg - 3 != ntypes)
    error->all(FLERR, "pair_coeff of eqaccel: expected {} elements, one for each atom type, got {}", ntypes, narg - 3);

  const std::string units = update->unit_style;
  if (units == "metal")
    energy_unit = 1.0;
  else if (units == "real")
    energy_unit = utils::get_conversion_factor(utils::ENERGY, utils::METAL2REAL);
  else
    error->all(FLERR, "pair_style eqaccel: units must be metal or real, and they are {}", units);

  int ranks_on_host = 1;
  const int rank_on_host = local_rank(ranks_on_host);
  std::string failure;
  try {
    const std::string found = utils::get_potential_file_path(arg[2]);
    const std::string path = found.empty() ? arg[2] : found;
    eqaccel::ModelOptions options;
    options.path = path.c_str();
    options.device = device.c_str();
    options.local_rank = rank_on_host;
    options.threads = threads > 0 ? threads : share_of_processors(ranks_on_host);
    options.allow_native_code = native_code;
    model.reset(load_model(&options));
  } catch (const std::exception &exception) {
    failure = std::string("pair_coeff of eqaccel: ") + exception.what();
  }
  stop_if_any(failure);

  const auto &info = model->info();
  const auto &names = info.type_names;
  element_of_type.assign(ntypes + 1, -1);
  for (int type = 1; type <= ntypes; ++type) {
    const std::string element = arg[2 + type];
    if (element == "NULL") continue;
    const auto found = std::find(names.begin(), names.end(), element);
    if (found == names.end()) {
      std::string known;
      for (const auto &known_name : names) known += (known.empty() ? "" : " ") + known_name;
      error->all(FLERR, "pair_coeff of eqaccel: the model does not know element {} of atom type {}, only {}", element,
                 type, known);
    }
    element_of_type[type] = static_cast<int>(found - names.begin());
  }

  if (!allocated) {
    memory->create(setflag, ntypes + 1, ntypes + 1, "pair:setflag");
    memory->create(cutsq, ntypes + 1, ntypes + 1, "pair:cutsq");
    allocated = 1;
  }
  for (int i = 1; i <= ntypes; ++i)
    for (int j = 1; j <= ntypes; ++j) setflag[i][j] = element_of_type[i] >= 0 && element_of_type[j] >= 0;

  nodes.expect_exchanges(info.exchange_widths, info.is_double);
  is_set_up = false;
  if (comm->me == 0)
    utils::logmesg(lmp, "eqaccel: {} runs in {} on {}, cutoff {:.8} angstrom\n", arg[2],
                   info.is_double ? "float64" : "float32", info.device, info.cutoff);
}

// The threads of OpenMP if somebody has said how many, else a rank's share of the host.
int PairEqaccel::share_of_processors(int ranks_on_host)
{
  if (const char *wanted = std::getenv("OMP_NUM_THREADS"); wanted && std::atoi(wanted) > 0) return std::atoi(wanted);
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) / ranks_on_host);
}

int PairEqaccel::local_rank(int &ranks_on_host) const
{
  int rank = 0;
#ifndef MPI_STUBS    // LAMMPS's own, for one rank
  MPI_Comm host;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, comm->me, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &rank);
  MPI_Comm_size(host, &ranks_on_host);
  MPI_Comm_free(&host);
#endif
  return rank;
}

int PairEqaccel::first_rank_with(const std::string &message) const
{
  int mine = message.empty() ? comm->nprocs : comm->me, first = 0;
  MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, world);
  return first;
}

void PairEqaccel::stop_if_any(const std::string &message)
{
  const int first = first_rank_with(message);
  if (first == comm->nprocs) return;
  int length = static_cast<int>(message.size());
  MPI_Bcast(&length, 1, MPI_INT, first, world);
  std::string text(message);
  text.resize(length);
  MPI_Bcast(&text[0], length, MPI_CHAR, first, world);
  error->all(FLERR, text);
}

void PairEqaccel::init_style()
{
  if (!force->newton_pair) error->all(FLERR, "pair_style eqaccel needs newton on: forces on ghosts are sent home");
  warn_of_exclusions();
  warn_of_heat_flux();
  stop_if_any(check_positions());
  neighbor->add_request(this, NeighConst::REQ_FULL);
  is_set_up = true;
  owners_known = false;
  choose_way();
}

// Whether neighbours are picked on the device, out of lists that stay there, or here; says so when it changes.
void PairEqaccel::choose_way()
{
  const std::string device_of_model = model->info().device;
  std::string obstacle = model->cannot_step();
  if (lists == "device" && !obstacle.empty())
    error->all(FLERR, "pair_style eqaccel: lists can not stay on the device: {}", obstacle);
  if (lists == "host") obstacle = "lists host";
  keeps_lists = obstacle.empty();
  const std::string now =
      keeps_lists
          ? fmt::format("eqaccel: lists stay on {} until LAMMPS rebuilds them, and neighbours are picked there\n",
                        device_of_model)
          : fmt::format("eqaccel: neighbours are picked on the host in every step: {}\n", obstacle);
  if (comm->me == 0 && now != way) utils::logmesg(lmp, now);
  way = now;
}

double PairEqaccel::init_one(int i, int j)
{
  if (setflag[i][j] == 0) error->all(FLERR, "pair_style eqaccel: types {} and {} have no elements", i, j);
  return model->info().cutoff;
}

void PairEqaccel::compute(int eflag, int vflag)
{
  if (!is_set_up)
    error->all(FLERR, "pair_style eqaccel: a run that follows pair_coeff has to find neighbours for its model: leave "
                      "out `pre no`");
  ev_init(eflag, vflag);
  if (neighbor->ago == 0 || !owners_known) {
    nodes.find_owners();
    missing.find(list, element_of_type);
    kept.forget();
    edges.forget();
  }
  owners_known = true;
  find_participants(lmp, element_of_type, takes_part);
  if (keeps_lists && compute_on_kept_lists()) return;
  if (rejects(collect_edges())) return;
  evaluate();
  if (rejects(check_results())) return;
  add_results();
}

// False if this step is one for the host: because of what is asked for, or because something in it has to be told. All
// ranks go the same way, because they exchange rows while they evaluate the model.
bool PairEqaccel::compute_on_kept_lists()
{
  const char *unusual = vflag_atom || cvflag_atom ? "virials of atoms" : is_trial_move() ? "trial moves" : nullptr;
  if (unusual) {
    kept.leave(unusual);
    return false;
  }
  std::string reason = check_positions().empty() ? "" : "positions that are not finite";
  run_model([&] {
    if (reason.empty()) reason = kept.prepare(*model, {list, missing.pairs(), nodes, takes_part, element_of_type});
  });
  if (all_leave(reason)) return false;
  nodes.start(1);
  run_model([this] { kept.evaluate(*model, comm->nprocs > 1 ? &nodes : nullptr); });
  if (all_leave(kept.failure(overlap))) return false;
  add_kept_results();
  return true;
}

// Whether any rank leaves a step to the host.
bool PairEqaccel::all_leave(const std::string &reason)
{
  if (first_rank_with(reason) == comm->nprocs) return false;
  kept.leave(reason.empty() ? "what another rank met" : reason);
  return true;
}

void PairEqaccel::finish()
{
  const std::string note = model ? kept.note(*model) : "";
  if (comm->me == 0 && !note.empty()) utils::logmesg(lmp, "eqaccel: {}\n", note);
}

bool PairEqaccel::rejects(const std::string &message)
{
  if (!is_trial_move()) {
    stop_if_any(message);
    return false;
  }
  if (first_rank_with(message) == comm->nprocs) return false;
  if (eflag_global && comm->me == 0) eng_vdwl += rejected_energy;
  return true;
}

// A fix that moves or inserts atoms to see what energy they would have says until it is done that lists are to be built
// in this very step. What it then leaves behind is computed once more, as every step is, and must be sound.
bool PairEqaccel::is_trial_move() const
{
  for (const char *style : {"^gcmc", "^widom", "^charge/regulation"})
    for (const Fix *fix : modify->get_fix_by_style(style))
      if (fix->next_reneighbor == update->ntimestep) return true;
  return false;
}

void PairEqaccel::warn_of_exclusions() const
{
  if (excludes_neighbors(lmp, setflag, element_of_type) && comm->me == 0)
    error->warning(FLERR,
                   "pair_style eqaccel: neigh_modify exclude or include takes neighbours from atoms of the model, so "
                   "that its energy and forces are not those of all atoms; to hold atoms still, leave them out of "
                   "the group of the integrator, or fix setforce 0 0 0");
}

// What compute stress/atom gives an atom is half of every edge that it is at, as for pairs. Their sum is the virial,
// but an atom also has energy of edges between others.
void PairEqaccel::warn_of_heat_flux() const
{
  if (comm->me == 0 && !modify->get_compute_by_style("^heat/flux").empty() &&
      modify->get_compute_by_style("^centroid/stress/atom").empty())
    error->warning(FLERR, "pair_style eqaccel: compute heat/flux is right with compute centroid/stress/atom only, and "
                          "there is none");
}

// A comparison with NaN is false, so an atom without a place would lose its edges in silence.
std::string PairEqaccel::check_positions() const
{
  for (int i = 0; i < atom->nlocal; ++i)
    for (int k = 0; k < 3; ++k)
      if (!std::isfinite(atom->x[i][k]))
        return fmt::format("pair_style eqaccel: the position of {} is not finite at step {}", name(i),
                           update->ntimestep);
  return "";
}

std::string PairEqaccel::collect_edges()
{
  const std::string message = check_positions();
  if (!message.empty()) return message;
  edges.collect(list, missing.pairs(), nodes, takes_part);
  nodes.start(cvflag_atom ? eqaccel::Model::moment_passes : 1);
  const auto [i, j] = edges.pick(model->info().cutoff, overlap);
  if (i >= 0) {
    const double *const *x = atom->x;
    return fmt::format("pair_style eqaccel: {} and {} overlap at step {}: they are {:.3} angstrom apart", name(i),
                       name(j), update->ntimestep, std::hypot(x[i][0] - x[j][0], x[i][1] - x[j][1], x[i][2] - x[j][2]));
  }
  types.clear();
  for (int node : nodes.atoms()) types.push_back(element_of_type[atom->type[node]]);
  return "";
}

void PairEqaccel::evaluate()
{
  const bool alone = comm->nprocs == 1;
  eqaccel::Frame frame;
  frame.num_local = nodes.num_local();
  frame.num_nodes = static_cast<int64_t>(nodes.atoms().size());
  frame.num_edges = static_cast<int64_t>(edges.count());
  frame.types = types.data();
  frame.senders = edges.senders.data();
  frame.receivers = edges.receivers.data();
  frame.vectors = edges.vectors.data();
  energies.resize(frame.num_local);
  gradients.resize(3 * edges.count());
  moments.reserve(1);    // so that there is an address without edges too: all ranks ask for moments, or none
  moments.resize(cvflag_atom ? 9 * edges.count() : 0);
  run_model([&] {
    if (frame.num_local > 0)
      model->evaluate(frame, alone ? nullptr : &nodes, energies.data(), gradients.data(),
                      cvflag_atom ? moments.data() : nullptr);
    else if (!alone)
      nodes.take_part();
  });
}

// The other ranks may be waiting in an exchange, so a failure ends them all. A message written just before that can be
// lost on its way through mpiexec.
void PairEqaccel::run_model(const std::function<void()> &work)
{
  std::string failure;
  try {
    return work();
  } catch (const LAMMPSException &) {
    throw;
  } catch (const std::exception &exception) {
    failure = std::string("pair_style eqaccel: ") + exception.what();
  }
  try {
    error->one(FLERR, failure);
  } catch (...) {
    if (comm->nprocs > 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    throw;
  }
}

std::string PairEqaccel::name(int i) const
{
  return atom->tag_enable ? "atom " + std::to_string(atom->tag[i]) : "an atom without ID";
}

double PairEqaccel::memory_usage()
{
  return Pair::memory_usage() + edges.memory_usage() +
         sizeof(double) * static_cast<double>(gradients.capacity() + moments.capacity());
}

int PairEqaccel::pack_forward_comm(int n, int *atoms, double *buffer, int, int *)
{
  return nodes.pack_owners(n, atoms, buffer);
}

void PairEqaccel::unpack_forward_comm(int n, int first, double *buffer)
{
  nodes.unpack_owners(n, first, buffer);
}
