// What the torch layer and the Python bindings see of the runtime: programs, compiled kernels, launches.
// No torch header, no CUDA header: GPU libraries are found at run time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "payload.h"

namespace eqaccel {

namespace cache {
struct Entry;
}

enum class Backend { cpu, cuda, hip };
enum class Scalar { float32, float64 };
enum class Direction { forward, backward, double_backward, triple_backward };

const char* name(Backend);
const char* name(Scalar);
const char* name(Direction);

// The whole text that a compiler gets for a kernel.
std::string translation_unit(Scalar, Direction, const std::string& prelude, const std::string& body);

// A kernel that could not be compiled, or that computes wrong results; `log` is what the compiler printed.
struct CompileError : std::runtime_error {
  CompileError(const std::string& message, std::string log_) : std::runtime_error(message), log(std::move(log_)) {}
  std::string log;
};
// No compiler (host compiler, NVRTC, hipRTC) was found for a backend; the message says what to install.
struct MissingCompilerError : CompileError {
  using CompileError::CompileError;
};
// A kernel takes more shared memory than a block of its GPU may take.
struct SharedMemoryError : CompileError {
  using CompileError::CompileError;
};

// Somebody ended the compiler.
struct InterruptedError : CompileError {
  using CompileError::CompileError;
};

class Kernel;  // one compiled direction of a program on one target, ready to launch
struct Family;  // families.h

// What compiling one direction gave, from the compiler or from the disk cache.
struct Compiled {
  std::string code;  // GPU: the binary to load; CPU: the bytes of a shared library
  std::string log;   // what the compiler printed
  std::string key;   // names the entry in the disk cache
  std::string path;  // the entry, "" if it could not be stored
  double seconds;
  bool cached;
};

// The sources and launch numbers of one computation, parsed from the payload that travels inside a module.
//
// Payload: the line "EQACCEL-PAYLOAD 1\n", then entries "<name> <size>\n<size bytes>\n". Entries:
//   meta                                     "key=value" lines: family, the name of one of families.h; else numbers: abi,
//                                            x_dim, y_dim, z_dim, w_dim, and for each GPU body
//                                            "<entry>/kernels", and for each of these kernels "<entry>/<n>/threads",
//                                            "<entry>/<n>/shared_bytes", "<entry>/<n>/edges_held" and
//                                            "<entry>/<n>/streams_weights"; "<entry>/code"
//                                            where an entry code/<number> follows it in the source; and
//                                            "shared_bytes/<architecture>", which a block may take there
//                                            "bfloat16_weights" where weights in float32 are rounded to that
//   prelude/<backend>                        text in front of every body of that backend
//   cpu/<direction>                          body for both scalars, which it calls EQ_SCALAR
//   tables/cpu/<direction>                   a line of whole numbers and a line of others, which such a body takes with its
//                                            operands where it is the same for all specs of the family
//   gpu<class>/<direction>/<scalar>          body for CUDA and HIP, with class "-" and the KiB of shared memory of a block;
//                                            a device takes that of its own class or else, of all, the body that takes
//                                            most of the shared memory that it has
//   code/<number>                            what bodies of several classes or scalars have in common, their second part
//   tuned/<target>/<direction>/<scalar>      body for one CPU target or GPU architecture, which takes it instead of the
//                                            above; may be absent
//   binary/<target>/<direction>/<scalar>     compiled ahead of time for a target of targets.h, taken where it runs; may
//                                            be absent
//   check/blocks, check/<direction>          what a right CPU kernel gives, see eqaccel/codegen/check.py; may be absent
//   plan/<body>                              the plan of a body in words, for EQACCEL_DUMP; may be absent
// Families add to these. Polynomials, radial basis functions, activations, gates and radial layers have:
//   meta "row_threads"                       threads of a GPU block, each of which takes a row
// polynomials
//   terms                                    a line for each term, see eqaccel/families/polynomial/payload.py
// activations
//   meta "thread_elements"                   elements that such a thread takes
// gates
//   meta "activations"                       such threads that a row takes
// and radial layers
//   meta "shared_weights"                    all rows have the same
//   meta "lanes_of_row", "thread_rows"       threads that share a row, and rows that each goes through
// a linear map has
//   meta "shared_weights"                    and, for each GPU body, its outputs, its kernels and the rows and columns that
//                                            their blocks take, see eqaccel/families/linear/payload.py; its direction
//                                            double_backward is the derivative by weights
//   paths                                    a line for each path, see there
// and a matrix product has no bodies but cpu/forward, gpu/forward/float32 and tuned/sm_90a/forward/float32, and numbers of
// its own, see eqaccel/families/matrix_product/payload.py.
class Program {
 public:
  Program(const uint8_t* payload, std::size_t size);
  const Family& family() const { return *family_; }
  int64_t number(const std::string& key) const;              // a meta entry; throws std::out_of_range if absent
  // Whether kernels of tensor products take weights that are rounded to bfloat16, and whether they read them as such: those
  // of second derivatives read the same values as float32.
  bool rounds_weights(Scalar scalar) const {
    return scalar == Scalar::float32 && numbers_.count("bfloat16_weights") > 0;
  }
  bool reads_bfloat16(Scalar scalar, Direction direction) const {
    return rounds_weights(scalar) && direction < Direction::double_backward;
  }
  const std::string& entry(const std::string& name) const;  // any entry; throws std::out_of_range if absent
  // Channels and components of the blocks that rows of a kind ('x', 'y', 'z' or 'w') have.
  std::vector<std::pair<int64_t, int64_t>> blocks(char kind) const;
  // Shared memory that a block of any kernel of a body for GPUs takes at most; 0 where the numbers do not say.
  int64_t shared_bytes(const std::string& body) const;
  // Name of the body that `compile` takes for an architecture.
  std::string body(Backend, Scalar, Direction, const std::string& arch = "") const;
  // What a kernel for the CPU takes beside its operands.
  Tables tables(Direction) const;
  // Prelude and body: the whole translation unit.
  std::string source(Backend, Scalar, Direction, const std::string& arch = "") const;
  // Compiles for "sm_90", "gfx90a", or (empty) this CPU; needs no GPU. Takes a binary of the payload if there is one,
  // else goes through the disk cache, which does without a compiler if it has the kernel. A kernel for the CPU is
  // checked before anybody gets it. Keeps nothing.
  Compiled compile(Backend, Scalar, Direction, const std::string& arch = "") const;
  // The bytes of a shared library that is to travel inside a payload, from source of its own; sets `log`. Past the cache.
  // Checked like others if the target runs here; where it is used it is checked in any case.
  std::string compile_for(const std::string& target, Scalar, Direction, const std::string& source,
                          std::string& log) const;
  // Compiles and loads a kernel ahead, whatever the family; thread-safe.
  void load(Backend, Scalar, Direction, int device) const;
  // Compiled on first use, then kept; thread-safe. `device` is ignored on the CPU. Throws std::invalid_argument for a
  // family whose kernels take other operands than eq_operands.
  const Kernel& kernel(Backend, Scalar, Direction, int device) const;
  // Bytes of scratch that a launch with these operands needs (sizes and flags are read, pointers are not). Device -1 is
  // the current device of the calling thread.
  std::size_t workspace_bytes(Backend, Scalar, Direction, const eq_operands&, int device = -1) const;

 private:
  struct Tools;
  static Tools find_tools(Backend);  // throws MissingCompilerError
  // Shared memory of a GPU block that an architecture has, as far as it is known here.
  int64_t available_shared_bytes(Backend, const std::string& arch) const;
  // Name of the body that is made for a target: of those for GPUs, the one that takes most of the shared memory it has.
  // Throws CompileError if none fits.
  std::string target_body(Backend, Scalar, Direction, const std::string& target) const;
  // The target whose binary in the payload runs on an architecture; "" if there is none.
  std::string precompiled_target(Backend, Scalar, Direction, const std::string& arch) const;
  std::string plan(Backend, Scalar, Direction, const std::string& arch) const;  // in words, "" if absent
  std::string described(Scalar, Direction) const;  // for errors and for those who wait
  cache::Entry make(const Tools&, Backend, Scalar, Direction, const std::string& arch, const std::string& text) const;
  // Whether the payload says what a right kernel gives.
  bool has_checksums(Direction) const;
  // Throws CompileError if code for this CPU does not give what the payload says; `made` tells where it comes from.
  void check(const std::string& code, Scalar, Direction, const std::string& made, const std::string& log) const;
  // The same once for these bytes and tables on this machine: the cache remembers it.
  void check_once(const std::string& code, const std::string& made, Scalar, Direction) const;
  std::string tables_text(Direction) const;  // of a kernel for the CPU, "" if it takes none
  std::string optional_entry(const std::string& name) const;  // "" if absent

  struct Slot;  // one kernel, with the lock under which it is compiled
  std::map<std::string, std::string> entries_;
  const Family* family_;
  std::map<std::string, int64_t> numbers_;
  mutable std::mutex mutex_;  // guards slots_ only, so that kernels compile side by side
  mutable std::map<uint64_t, std::shared_ptr<Slot>> slots_;
};

// The program registered under `key`; parsed from the payload the first time a key is seen. Process-wide, thread-safe.
// The key is a digest of the payload (payload.h): one that does not belong to it throws std::invalid_argument, so that a
// payload that was damaged on its way is never used.
std::shared_ptr<Program> find_program(int64_t key);  // null when the key is not known yet
std::shared_ptr<Program> register_program(int64_t key, const uint8_t* payload, std::size_t size);

}  // namespace eqaccel
