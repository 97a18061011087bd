// What torch gets back from an asynchronous operation.
#pragma once

#include "waiting.hpp"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch_mpi {

class Engine;
class DeviceStreams;

// What is known of an operation before it starts.
struct Operation {
  c10d::OpType type;
  const char* name; // "allreduce"
  const char* profiling_title; // "mpi:all_reduce"
  std::chrono::milliseconds timeout;
  uint64_t number = 0;
  Clock::time_point deadline;
};

// Only an active profiler makes Work's constructor do anything with the title.
const char* title_if_profiling(const char* title);

class CollectiveWork : public c10d::Work {
 public:
  // `after` (may be null) makes streams wait for device results in wait().
  CollectiveWork(
      std::shared_ptr<Engine> engine,
      const Operation& op,
      std::vector<at::Tensor> inputs,
      std::vector<at::Tensor> outputs,
      std::function<void(Waiter&)> body,
      std::shared_ptr<DeviceStreams> after);

  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override {
    return op_.number;
  }

  const Operation& operation() const {
    return op_;
  }
  // Carries out the operation; called once, by the engine. Returns its exception, if any.
  std::exception_ptr execute(Waiter& w);
  // Then, when the engine is free again: completes the future. Its callbacks may issue operations of
  // the same group and wait for them (DDP's PowerSGD hook does).
  void complete_future();
  // Ends it without carrying it out.
  void refuse(std::exception_ptr why);

 private:
  void complete(std::exception_ptr error);

  std::shared_ptr<Engine> engine_;
  Operation op_;
  std::vector<at::Tensor> outputs_;
  std::function<void(Waiter&)> body_;
  std::shared_ptr<DeviceStreams> after_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
  bool future_done_ = false;
  std::exception_ptr error_;
};

} // namespace torch_mpi
