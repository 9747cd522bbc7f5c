#include "process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "cache.h"
#include "settings.h"

extern char** environ;

namespace eqaccel {

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> running{0};
std::atomic<int64_t> endings{0};

std::mutex check_mutex;
// Leaked on purpose, as the handler of warnings.
std::function<bool()>& interrupt_check() {
  static auto* value = new std::function<bool()>;
  return *value;
}

pid_t parent_of(const std::string& process) {
  std::ifstream file("/proc/" + process + "/stat");
  std::string text;
  std::getline(file, text);
  char state;
  int parent = 0;
  const std::size_t name_end = text.rfind(')');  // names may hold spaces and parentheses
  if (name_end == std::string::npos || std::sscanf(text.c_str() + name_end + 1, " %c %d", &state, &parent) != 2)
    return 0;
  return parent;
}

// Kills a program and what it started: a compiler is a driver that waits for others. They stay in the process group of
// the host, so that what ends that group ends them.
void kill_family(pid_t first) {
  std::vector<pid_t> family{first};
  for (std::size_t n = 0; n < family.size(); ++n) {
    kill(family[n], SIGSTOP);  // so that it starts no more
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      if (parent_of(name) == family[n]) family.push_back(std::stoi(name));
    }
  }
  for (const pid_t member : family) kill(member, SIGKILL);
}

// A program that runs, and its share of the cores.
class Process {
 public:
  explicit Process(const Command& command) : output_path_(command.output_path), start_(Clock::now()) {
    std::vector<char*> arguments;
    for (const std::string& word : command.words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    // Output goes to a file, not a pipe: nothing has to be drained while the program runs.
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, output_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    const int error = posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error) {
      pid_ = 0;
      failure_ = std::string(arguments[0]) + ": " + std::strerror(error);
    }
    ++running;
  }
  ~Process() {
    if (pid_) {
      kill_family(pid_);
      while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
      }
    }
    --running;
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool ended() {
    if (!pid_) return true;
    const pid_t waited = waitpid(pid_, &status_, WNOHANG);
    if (waited == 0 || (waited < 0 && errno == EINTR)) return false;
    // A host program that ignores SIGCHLD gets no status; whoever called then judges by the files that were made.
    if (waited < 0) status_ = 0;
    pid_ = 0;
    return true;
  }
  ProcessResult result() const {
    if (!failure_.empty()) return {-1, failure_};
    // What a terminal sends to all of a group.
    if (WIFSIGNALED(status_) && WTERMSIG(status_) == SIGINT) throw Interrupted("it was interrupted");
    return {WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_), cache::read_file(output_path_)};
  }
  std::chrono::duration<double> time() const { return Clock::now() - start_; }

 private:
  std::string output_path_, failure_;
  Clock::time_point start_;
  pid_t pid_ = 0;
  int status_ = 0;
};

}  // namespace

std::vector<ProcessResult> run_processes(const std::vector<Command>& commands, const Waiting& waiting) {
  static const int cores = std::max<int>(std::thread::hardware_concurrency(), 1);
  const InterruptWatch interrupt;
  const Clock::time_point start = Clock::now();
  std::vector<ProcessResult> results(commands.size());
  std::map<std::size_t, Process> active;
  std::size_t next = 0;
  auto pause = std::chrono::milliseconds(1);
  while (next < commands.size() || !active.empty()) {
    // The first of a call does not wait, as others may never end; of several calls these are few.
    if (next < commands.size() && (active.empty() || running < cores)) {
      active.try_emplace(next, commands[next]);
      ++next;
      continue;
    }
    bool some_ended = false;
    for (auto item = active.begin(); item != active.end();) {
      if (!item->second.ended()) {
        if (item->second.time() > waiting.limit) throw TimedOut("it took too long");
        ++item;
        continue;
      }
      results[item->first] = item->second.result();
      if (results[item->first].status != 0) return results;
      item = active.erase(item);
      some_ended = true;
    }
    if (some_ended) continue;
    if (interrupt.noticed()) throw Interrupted("it was interrupted");
    if (waiting.tell) waiting.tell(std::chrono::duration<double>(Clock::now() - start).count());
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(20));
  }
  return results;
}

void end_processes() { ++endings; }

InterruptWatch::InterruptWatch() : endings_(endings) {}

bool InterruptWatch::noticed() const {
  if (endings != endings_) return true;
  std::function<bool()> check;
  {
    std::lock_guard<std::mutex> lock(check_mutex);
    check = interrupt_check();
  }
  return check && check();
}

void set_interrupt_check(std::function<bool()> check) {
  std::lock_guard<std::mutex> lock(check_mutex);
  interrupt_check() = std::move(check);
}

std::string find_executable(const std::string& name) {
  const auto runs = [](const std::string& path) {
    struct stat info;
    return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) return runs(name) ? name : "";
  std::istringstream folders(environment("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (!folder.empty() && runs(folder + "/" + name)) return folder + "/" + name;
  }
  return "";
}

}  // namespace eqaccel
