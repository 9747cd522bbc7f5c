// What a GPU does, recorded to be run again without its launches from the host.
#pragma once
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

namespace eqaccel {

// A recording, as torch makes it: through its own class for CUDA graphs, whose headers include CUDA's. The interface for
// graphs of any device that torch has since 2.13 is free of them, but nothing stands behind it for CUDA. All calls are made on one stream, which is not the default one.
class Recorder {
 public:
  virtual ~Recorder() = default;
  virtual void begin() = 0;
  virtual void end() = 0;
  virtual void replay() = 0;
};

class GraphCapture {
 public:
  // Why nothing can be recorded on a device; empty if it can.
  static std::string obstacle(c10::Device);

  // Records what `body` has the device do on the current stream, which does not run yet. Throws what `body` throws, and
  // c10::Error where it does what can not be recorded.
  explicit GraphCapture(const std::function<void()>& body);

  // Runs it on the current stream.
  void replay() { recorder_->replay(); }

 private:
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace eqaccel

// Of libeqaccel_capture, which is built where torch's GPU half and CUDA's headers are.
extern "C" eqaccel::Recorder* eqaccel_new_recorder();
