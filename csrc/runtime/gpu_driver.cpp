#include "gpu_driver.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dynamic_library.h"
#include "settings.h"

namespace eqaccel {
namespace {

// Values of CUdevice_attribute and CUfunction_attribute.
enum CudaAttribute {
  cuda_warp_size = 10,
  cuda_multiprocessors = 16,
  cuda_major = 75,
  cuda_minor = 76,
  cuda_shared_bytes_per_multiprocessor = 81,
  cuda_registers_per_multiprocessor = 82,
  cuda_shared_bytes_per_block = 97,
  cuda_function_dynamic_shared_bytes = 8,
};

// CUlaunchConfig with its attributes, of which one is used: that a kernel may begin before the last one has ended.
struct CudaLaunchAttribute {
  int id;
  alignas(8) int value;
  char rest[60];
};
struct CudaLaunch {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const CudaLaunchAttribute* attributes;
  unsigned count;
};
constexpr CudaLaunchAttribute cuda_early = {6, 1, {}};
constexpr int cuda_with_early_launches = 12030;  // the driver's version that has them in graphs, too

// The start of hipDeviceProp_tR0600 (ROCm 6 and newer).
struct HipProperties {
  char name[256];
  char uuid[16], luid[8];
  unsigned luid_mask;
  std::size_t memory_bytes, shared_bytes_per_block;
  int registers_per_block, warp_size;
  std::size_t pitch;
  int threads_per_block, thread_dims[3], grid_dims[3], clock;
  std::size_t constant_bytes;
  int major, minor;
  std::size_t texture_alignment, texture_pitch;
  int overlap, multiprocessors;
  char rest[8192];  // more than any version of the structure has
};

}  // namespace

struct GpuDriver::Table {
  int (*count)(int*);
  int (*load_module)(void** module, const void* binary);
  int (*get_function)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared_bytes,
                void* stream, void** parameters, void** extra);
  int (*resident_blocks)(int* blocks, void* function, int threads, std::size_t shared_bytes);
  int (*fill)(void* pointer, unsigned char value, std::size_t count, void* stream);
  int (*is_capturing)(void* stream, int* status);
  int (*error_name)(int, const char**);
  // CUDA only.
  int (*device_name)(char*, int size, int device);
  int (*device_attribute)(int* value, int which, int device);
  int (*device_memory)(std::size_t* bytes, int device);
  int (*retain_context)(void** context, int device);
  int (*current_context)(void** context);
  int (*current_context_device)(int* device);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*set_function_attribute)(void* function, int which, int value);
  int (*version)(int*);
  int (*launch_with)(const CudaLaunch*, void* function, void** parameters, void** extra);  // null: too old a driver
  // HIP only.
  int (*properties)(HipProperties*, int device);
  int (*get_device)(int*);
  int (*set_device)(int);

  std::vector<DeviceInfo> devices;
  std::vector<void*> contexts;  // of CUDA, one per device, filled at first use
  std::mutex mutex;
};

GpuDriver::GpuDriver(Backend backend) : backend_(backend) {
  const bool cuda = backend == Backend::cuda;
  void* library =
      cuda ? open_first({"libcuda.so.1", "libcuda.so"})
           : open_first({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so"});
  if (!library) {
    throw std::runtime_error(cuda ? "no NVIDIA driver on this machine: libcuda.so.1 was not found"
                                  : "no AMD GPU runtime on this machine: libamdhip64.so was not found");
  }
  auto table = std::make_unique<Table>();
  const auto find = [&](const char* name, auto& function) { find_function(library, name, function); };
  int (*init)(unsigned);
  find(cuda ? "cuInit" : "hipInit", init);
  find(cuda ? "cuDeviceGetCount" : "hipGetDeviceCount", table->count);
  find(cuda ? "cuModuleLoadData" : "hipModuleLoadData", table->load_module);
  find(cuda ? "cuModuleGetFunction" : "hipModuleGetFunction", table->get_function);
  find(cuda ? "cuLaunchKernel" : "hipModuleLaunchKernel", table->launch);
  find(cuda ? "cuOccupancyMaxActiveBlocksPerMultiprocessor" : "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
       table->resident_blocks);
  find(cuda ? "cuMemsetD8Async" : "hipMemsetD8Async", table->fill);
  find(cuda ? "cuStreamIsCapturing" : "hipStreamIsCapturing", table->is_capturing);
  find(cuda ? "cuGetErrorName" : "hipDrvGetErrorName", table->error_name);
  if (cuda) {
    find("cuDeviceGetName", table->device_name);
    find("cuDeviceGetAttribute", table->device_attribute);
    find("cuDeviceTotalMem_v2", table->device_memory);
    find("cuDevicePrimaryCtxRetain", table->retain_context);
    find("cuCtxGetCurrent", table->current_context);
    find("cuCtxGetDevice", table->current_context_device);
    find("cuCtxPushCurrent_v2", table->push_context);
    find("cuCtxPopCurrent_v2", table->pop_context);
    find("cuFuncSetAttribute", table->set_function_attribute);
    find("cuDriverGetVersion", table->version);
  } else {
    find("hipGetDevicePropertiesR0600", table->properties);
    find("hipGetDevice", table->get_device);
    find("hipSetDevice", table->set_device);
  }
  table_ = table.get();
  check(init(0), "start the driver");
  int count = 0, version = 0;
  if (cuda) check(table->version(&version), "read the driver's version");
  if (version >= cuda_with_early_launches) find("cuLaunchKernelEx", table->launch_with);
  check(table->count(&count), "count devices");
  table->contexts.resize(count);
  for (int device = 0; device < count; ++device) table->devices.push_back(read_device(device));
  table.release();  // lives as long as the process, as the driver does
}

const GpuDriver& GpuDriver::get(Backend backend) {
  if (backend == Backend::cuda) {
    static const GpuDriver cuda(backend);
    return cuda;
  }
  if (backend == Backend::cpu) throw std::invalid_argument("backend: expected cuda or hip, got cpu");
  static const GpuDriver hip(backend);
  return hip;
}

int GpuDriver::device_count(Backend backend) {
  try {
    return int(get(backend).table_->devices.size());
  } catch (const std::runtime_error&) {
    return 0;
  }
}

void GpuDriver::check(int status, const char* what) const {
  if (status == 0) return;
  const char* error = nullptr;
  table_->error_name(status, &error);
  throw std::runtime_error(std::string(name(backend_)) + ": could not " + what + ": " +
                           (error ? error : "error " + std::to_string(status)));
}

DeviceInfo GpuDriver::read_device(int device) const {
  if (backend_ == Backend::cuda) {
    const auto attribute = [&](int which) {
      int value = 0;
      check(table_->device_attribute(&value, which, device), "read a device attribute");
      return value;
    };
    char name[256] = "";
    check(table_->device_name(name, sizeof name, device), "read a device name");
    std::size_t memory = 0;
    check(table_->device_memory(&memory, device), "read a device's memory");
    const std::string arch = "sm_" + std::to_string(attribute(cuda_major)) + std::to_string(attribute(cuda_minor));
    return {name,
            arch,
            attribute(cuda_multiprocessors),
            attribute(cuda_warp_size),
            int(std::min<int64_t>(attribute(cuda_shared_bytes_per_block), settings::shared_bytes())),
            attribute(cuda_shared_bytes_per_block),
            attribute(cuda_shared_bytes_per_multiprocessor),
            attribute(cuda_registers_per_multiprocessor),
            memory,
            attribute(cuda_major) >= 9 && table_->launch_with != nullptr};
  }
  auto properties = std::make_unique<HipProperties>();
  check(table_->properties(properties.get(), device), "read device properties");
  // The architecture's name lies deep inside the structure; its text is found without knowing the offset.
  const char* rest = properties->rest;
  for (const char* at = rest; at + 256 < rest + sizeof properties->rest; ++at) {
    if (std::memcmp(at, "gfx", 3) != 0) continue;
    const int shared = int(properties->shared_bytes_per_block);
    return {properties->name,
            at,
            properties->multiprocessors,
            properties->warp_size,
            int(std::min<int64_t>(shared, settings::shared_bytes())),
            shared,
            shared,
            properties->registers_per_block,
            properties->memory_bytes,
            false};
  }
  throw std::runtime_error("hip: the runtime does not tell the architecture of device " + std::to_string(device));
}

const DeviceInfo& GpuDriver::device(int device) const {
  if (device < 0 || device >= int(table_->devices.size())) {
    throw std::out_of_range(std::string(name(backend_)) + ": expected a device below " +
                            std::to_string(table_->devices.size()) + ", got " + std::to_string(device));
  }
  return table_->devices[device];
}

int GpuDriver::current_device() const {
  int device = -1;
  const int status = backend_ == Backend::cuda ? table_->current_context_device(&device) : table_->get_device(&device);
  return status == 0 ? device : -1;
}

void* GpuDriver::context(int device) const {
  this->device(device);  // range check
  std::lock_guard<std::mutex> lock(table_->mutex);
  void*& context = table_->contexts[device];
  if (!context) check(table_->retain_context(&context, device), "open the device");
  return context;
}

GpuDriver::Module GpuDriver::load_module(const std::string& binary, int device) const {
  DeviceScope scope(*this, device);
  Module module = nullptr;
  check(table_->load_module(&module, binary.data()), "load a compiled kernel");
  return module;
}

GpuDriver::Function GpuDriver::get_function(Module module, const char* name) const {
  Function function = nullptr;
  check(table_->get_function(&function, module, name), (std::string("find the kernel ") + name).c_str());
  return function;
}

void GpuDriver::set_shared_bytes(Function function, int bytes) const {
  if (backend_ != Backend::cuda) return;
  check(table_->set_function_attribute(function, cuda_function_dynamic_shared_bytes, bytes),
        ("reserve " + std::to_string(bytes) + " bytes of shared memory").c_str());
}

int GpuDriver::resident_blocks(Function function, int threads, std::size_t shared_bytes) const {
  int blocks = 0;
  check(table_->resident_blocks(&blocks, function, threads, shared_bytes), "read the occupancy of a kernel");
  return blocks;
}

void GpuDriver::launch(Function function, Dim3 grid, Dim3 block, unsigned shared_bytes, void* stream,
                       void** parameters) const {
  check(table_->launch(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, stream, parameters,
                       nullptr),
        "launch a kernel");
}

void GpuDriver::launch_early(Function function, Dim3 grid, Dim3 block, unsigned shared_bytes, void* stream,
                             void** parameters) const {
  const CudaLaunch how = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, stream, &cuda_early, 1};
  check(table_->launch_with(&how, function, parameters, nullptr), "launch a kernel");
}

void GpuDriver::fill_zero(void* pointer, std::size_t bytes, void* stream) const {
  if (bytes) check(table_->fill(pointer, 0, bytes, stream), "clear memory");
}

bool GpuDriver::is_capturing(void* stream, int device) const {
  DeviceScope scope(*this, device);
  int status = 0;
  check(table_->is_capturing(stream, &status), "ask whether a graph is recorded");
  return status != 0;
}

DeviceScope::DeviceScope(const GpuDriver& driver, int device) : driver_(driver) {
  const auto* table = driver.table_;
  if (driver.backend_ == Backend::cuda) {
    void* current = nullptr;
    driver.check(table->current_context(&current), "read the current context");
    void* wanted = driver.context(device);
    if (current == wanted) return;
    driver.check(table->push_context(wanted), "make the device current");
  } else {
    driver.check(table->get_device(&previous_), "read the current device");
    if (previous_ == device) return;
    driver.check(table->set_device(device), "make the device current");
  }
  changed_ = true;
}

DeviceScope::~DeviceScope() {
  if (!changed_) return;
  void* ignored;
  if (driver_.backend_ == Backend::cuda) {
    driver_.table_->pop_context(&ignored);
  } else {
    driver_.table_->set_device(previous_);
  }
}

}  // namespace eqaccel
