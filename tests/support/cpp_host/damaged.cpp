// Opens files as a simulation program does, and prints for each what became of it.
// Usage: damaged <libeqaccel_model.so> <folder> <count>; the files are 0.bin, 1.bin, ...
#include <dlfcn.h>
#include <eqaccel/model.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: %s <libeqaccel_model.so> <folder> <count>\n", argv[0]), 2;
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  using Loader = eqaccel::Model* (*)(const eqaccel::ModelOptions*);
  const auto load = reinterpret_cast<Loader>(dlsym(library, "eqaccel_load_model_5"));
  for (int number = 0; number < std::atoi(argv[3]); ++number) {
    const std::string path = std::string(argv[2]) + "/" + std::to_string(number) + ".bin";
    eqaccel::ModelOptions options;
    options.path = path.c_str();
    try {
      const std::unique_ptr<eqaccel::Model> model(load(&options));
      std::puts("opened");
    } catch (const std::exception& error) {
      std::puts(error.what());
    }
  }
  return 0;
}
