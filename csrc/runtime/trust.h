// Whose files are read: compiled code runs with the rights of the user, so it must not come from somebody else.
#pragma once
#include <sys/stat.h>

#include <optional>
#include <string>

namespace eqaccel {

// A file descriptor that is closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  Descriptor& operator=(Descriptor&&) noexcept;
  ~Descriptor();
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

// Why a file or folder is not trusted, "" if it is: the user or root owns it, and nobody else can write it.
std::string distrust(const struct stat&);

// The same for a file that another program will open by its path: every folder above it counts too, since who can write
// one of them can put another file into its place. Folders with the sticky bit, as /tmp, protect what others own.
std::string distrust_path(const std::string& path);

// Opens a folder that is trusted. Else gives none, and sets `problem` unless there is no such folder. What is opened
// relative to the descriptor stays in this folder, whatever becomes of its path.
Descriptor open_trusted_folder(const std::string& path, std::string& problem);

// Opens a file of a folder that is trusted: a regular one, no link to elsewhere, and not a pipe or a device, which is
// found out without waiting for it. Else gives none, and sets `problem` unless there is no such file.
Descriptor open_trusted_file(const Descriptor& folder, const std::string& name, int flags, std::string& problem);

// All bytes of a file; nothing and `problem` if they can not be read.
std::optional<std::string> read_all(const Descriptor&, std::string& problem);
// Returns false, and leaves errno, if not all bytes can be written.
bool write_all(const Descriptor&, const std::string& content);

}  // namespace eqaccel
