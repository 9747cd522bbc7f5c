// Running programs without a shell.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace eqaccel {

struct Command {
  std::vector<std::string> words;  // the program, found on PATH, and its arguments
  std::string output_path;         // a file that it may use for the output
};

struct ProcessResult {
  int status;          // exit status; 128 + signal if killed; -1 if the program could not be started
  std::string output;  // stdout and stderr, as they came
};

// A program was ended, and what it had started too, because somebody asked for it or because it took too long.
struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Waiting {
  std::chrono::duration<double> limit;               // for each program
  std::function<void(double seconds)> tell = nullptr;  // called now and then while programs run
};

// Runs programs to their ends, side by side; all calls of this process together run one a core. After one that fails the
// others are ended, and not started. No program outlives the call, which may throw Interrupted or TimedOut.
std::vector<ProcessResult> run_processes(const std::vector<Command>&, const Waiting&);

// Ends the programs of all calls that run now: these throw Interrupted.
void end_processes();
// Asked now and then by calls that wait; true ends them as above. A host with signal handlers of its own sets it.
void set_interrupt_check(std::function<bool()>);
// Tells long work that it is to end: because the check says so, or since end_processes was called after this was made.
class InterruptWatch {
 public:
  InterruptWatch();
  bool noticed() const;

 private:
  int64_t endings_;
};

// The full path of an executable, "" if there is none; a name with a slash is not looked up on PATH.
std::string find_executable(const std::string& name);

}  // namespace eqaccel
