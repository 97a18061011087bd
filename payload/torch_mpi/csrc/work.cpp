#include "work.hpp"

#include "tensor_memory.hpp"
#include "engine.hpp"
#include "errors.hpp"

#include <ATen/record_function.h>

#include <utility>

namespace torch_mpi {

namespace {

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& t : tensors) {
    if (!t.device().is_cpu()) {
      devices.push_back(t.device());
    }
  }
  return devices;
}

} // namespace

const char* title_if_profiling(const char* title) {
  return at::hasCallbacks() ? title : nullptr;
}

CollectiveWork::CollectiveWork(
    std::shared_ptr<Engine> engine,
    const Operation& op,
    std::vector<at::Tensor> inputs,
    std::vector<at::Tensor> outputs,
    std::function<void(Waiter&)> body,
    std::shared_ptr<DeviceStreams> after)
    : c10d::Work(
          engine->communicator()->rank(),
          op.type,
          title_if_profiling(op.profiling_title),
          std::make_optional(std::move(inputs))),
      engine_(std::move(engine)),
      op_(op),
      outputs_(std::move(outputs)),
      body_(std::move(body)),
      after_(std::move(after)) {}

std::exception_ptr CollectiveWork::execute(Waiter& w) {
  std::exception_ptr error;
  try {
    body_(w);
  } catch (const Abandoned&) {
    error = std::current_exception();
    keep_for_ever(std::move(body_));
  } catch (...) {
    error = std::current_exception();
  }
  body_ = nullptr; // lets go of the tensors
  complete(error);
  return error;
}

void CollectiveWork::refuse(std::exception_ptr why) {
  body_ = nullptr;
  complete(std::move(why));
}

void CollectiveWork::complete(std::exception_ptr error) {
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    settled_ = true;
    error_ = error;
  }
  finish(std::move(error));
}

void CollectiveWork::complete_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (!settled_ || !future_ || std::exchange(future_done_, true)) {
      return;
    }
    future = future_;
  }
  if (error_) {
    future->setErrorIfNeeded(error_);
  } else {
    const auto streams = after_ ? after_->enter() : nullptr;
    future->markCompleted(c10::IValue(outputs_));
  }
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  std::optional<Clock::time_point> until;
  if (timeout != kNoTimeout) {
    until = Clock::now() + timeout;
  }
  if (!isCompleted() && !engine_->help(*this, until)) {
    raise_backend_error(c10::str(
        "mpi ", op_.name, " (operation ", op_.number, " of group '", engine_->group_name(),
        "'): not complete ", timeout.count(), " ms after wait() was called"));
  }
  synchronize();
  return true;
}

void CollectiveWork::synchronize() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    error = error_;
  }
  if (error) {
    std::rethrow_exception(error);
  }
  if (after_) {
    after_->block_current_streams();
  }
}

void CollectiveWork::abort() {
  engine_->abort("work.abort() was called");
}

std::vector<at::Tensor> CollectiveWork::result() {
  return outputs_;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices_of(outputs_));
    }
    future = future_;
  }
  complete_future(); // if the operation has ended already
  return future;
}

} // namespace torch_mpi
