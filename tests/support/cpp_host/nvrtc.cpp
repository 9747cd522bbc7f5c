// Stands in for an NVRTC whose wheel does not say where its second library lies: it opens it by name alone, to "compile".
#include <dlfcn.h>

#include <cstddef>
#include <cstring>

static const char code[] = "code", log_text[] = "nvrtc: error: no libnvrtc-builtins.so.99.7";

extern "C" {
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(void*, int, const char* const*) {
  return dlopen("libnvrtc-builtins.so.99.7", RTLD_NOW) ? 0 : 7;
}
int nvrtcGetProgramLogSize(void*, std::size_t* size) { return *size = sizeof(log_text), 0; }
int nvrtcGetProgramLog(void*, char* log) { return std::memcpy(log, log_text, sizeof(log_text)), 0; }
int nvrtcGetCUBINSize(void*, std::size_t* size) { return *size = sizeof(code) - 1, 0; }
int nvrtcGetCUBIN(void*, char* to) { return std::memcpy(to, code, sizeof(code) - 1), 0; }
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcVersion(int* major, int* minor) { return *major = 99, *minor = 7, 0; }
const char* nvrtcGetErrorString(int) { return "an error"; }
}
