// Running a program without a shell.
#pragma once
#include <string>
#include <vector>

namespace eqaccel {

struct ProcessResult {
  int status;          // exit status; 128 + signal if killed; -1 if the program could not be started
  std::string output;  // stdout and stderr, as they came
};

// Runs `command` (found on PATH) to its end; `output_path` is a file that it may use for the output.
ProcessResult run_process(const std::vector<std::string>& command, const std::string& output_path);

// The full path of an executable, "" if there is none; a name with a slash is not looked up on PATH.
std::string find_executable(const std::string& name);

}  // namespace eqaccel
