// SPDX-License-Identifier: GPL-2.0-only
//
// What LAMMPS's command `plugin load` looks for.
#include "pair_eqaccel.h"

#include "error.h"
#include "library.h"

using namespace LAMMPS_NS;

namespace
{

// LAMMPS does not install lammpsplugin.h, so its documented struct is written out here.
struct LammpsPlugin {
  const char *version, *style, *name, *info, *author;
  union {
    Pair *(*pair)(LAMMPS *);
    void *(*other)(LAMMPS *, int, char **);
  } creator;
  void *handle;
};

// The layout of LAMMPS's classes changes between versions and with its integer sizes, so with another LAMMPS than it
// was built for, the style would read and write in wrong places.
Pair *create(LAMMPS *lmp)
{
  const int version = lammps_version(lmp);
  if (version != EQACCEL_LAMMPS_VERSION)
    lmp->error->all(FLERR, "pair_style eqaccel was built for LAMMPS " + std::to_string(EQACCEL_LAMMPS_VERSION) +
                               ", and this is " + std::to_string(version) + ": build the plugin again for this one");
  if (lammps_extract_setting(lmp, "tagint") != static_cast<int>(sizeof(tagint)) ||
      lammps_extract_setting(lmp, "imageint") != static_cast<int>(sizeof(imageint)))
    lmp->error->all(FLERR, "pair_style eqaccel was built for a LAMMPS with other integer sizes: build the plugin "
                           "again with LAMMPS_SIZES as in `lmp -h` (SMALLBIG or BIGBIG)");
  return new PairEqaccel(lmp);
}

}    // namespace

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void *lmp, void *handle, void *register_plugin)
{
  LammpsPlugin plugin;
  // LAMMPS would compare a version string with its own here, updates of a release included, and say so at every start.
  plugin.version = nullptr;
  plugin.style = "pair";
  plugin.name = "eqaccel";
  plugin.info = "pair style eqaccel, accelerated O(3)-equivariant models";
  plugin.author = "the eqaccel developers";
  plugin.creator.pair = create;
  plugin.handle = handle;
  reinterpret_cast<void (*)(LammpsPlugin *, void *)>(register_plugin)(&plugin, lmp);
}
