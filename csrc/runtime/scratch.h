// Files that live as long as one compilation.
#pragma once
#include <string>

namespace eqaccel::cache {

// A folder of its own for one compilation, private to the user: in the cache folder if possible, else in TMPDIR, /tmp,
// or memory (/dev/shm), whichever has room; removed with its content at the end of its life. What a killed process
// leaves behind in the cache folder is removed after a day. Throws CompileError if there is room nowhere.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

constexpr char temporary_prefix[] = ".tmp-";

// Both throw CompileError, which names the file and the reason.
std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& content);

}  // namespace eqaccel::cache
