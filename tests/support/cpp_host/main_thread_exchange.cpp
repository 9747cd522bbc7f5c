// Uses csrc/model/main_thread_exchange.h as a GPU would: the work, and a thread that it waits for, exchange rows that the main thread
// must see. Prints what happened; any mistake is a wrong line or a hang.
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "main_thread_exchange.h"

namespace {

const std::thread::id main_thread = std::this_thread::get_id();

struct Engine final : eqaccel::GhostExchange {
  void nodes(eqaccel::GhostNodes& nodes) const override { nodes.num_ghosts = 3; }
  void forward(const void*, void* ghost_rows, int64_t width, bool) override {
    if (width == 13) throw std::runtime_error("refused by the engine");
    static_cast<double*>(ghost_rows)[0] += 1;
    report("forward", width);
  }
  void reverse(const void*, void* rows, int64_t width, bool) override {
    static_cast<double*>(rows)[0] += 10;
    report("reverse", width);
  }
  static void report(const char* name, int64_t width) {
    std::printf("%s %d %s\n", name, int(width), std::this_thread::get_id() == main_thread ? "main" : "other");
  }
};

}  // namespace

int main() {
  Engine engine;
  double row = 0;
  {
    eqaccel::MainThreadExchange exchange;
    for (int step = 0; step < 2; ++step) {
      exchange.run(&engine, [&] {
        exchange.forward(nullptr, &row, 1, true);
        std::thread([&] { exchange.reverse(nullptr, &row, 2, true); }).join();
      });
      std::printf("row %g\n", row);
    }
    exchange.run(&engine, [&] {
      eqaccel::GhostNodes nodes;
      exchange.nodes(nodes);
      std::printf("ghosts %d\n", int(nodes.num_ghosts));
    });
    exchange.run(nullptr,
                 [&] { std::printf("alone %s\n", std::this_thread::get_id() == main_thread ? "main" : "other"); });
    try {
      exchange.run(&engine, [&] { exchange.forward(nullptr, &row, 13, true); });
    } catch (const std::runtime_error& error) {
      std::printf("caught %s\n", error.what());
    }
    try {
      exchange.run(&engine, [] { throw std::runtime_error("failed by itself"); });
    } catch (const std::runtime_error& error) {
      std::printf("caught %s\n", error.what());
    }
    exchange.run(&engine, [&] { exchange.forward(nullptr, &row, 1, true); });
  }
  std::printf("end\n");
}
