// From tensors to memory that MPI can read and write.
//
// Contiguous host tensors are used where they are. Everything else goes through a copy: strided or
// conjugated tensors, and device tensors unless MPI is CUDA-aware (those through pinned memory).
// Only c10's generic stream and event interface is used, so the extension built against a CPU
// wheel is the same code that runs on CUDA.
#pragma once

#include "algorithms.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>
#include <vector>

namespace torch_mpi {

// The device part of one operation: what it must wait for, and what must wait for it.
class DeviceStreams {
 public:
  // Null for host tensors. Notes the current stream of the caller.
  static std::shared_ptr<DeviceStreams> of(const at::Tensor& tensor);

  explicit DeviceStreams(c10::Device device);

  // Copies of this operation run on a stream of its own while the guard lives.
  std::unique_ptr<c10::StreamGuard> enter() const;
  // Makes that stream wait for what the caller had issued before the operation.
  void follow_caller();
  // Makes this thread wait until that stream has done everything so far; never the whole device.
  void wait_on_host();
  void mark_done();
  // Makes the current stream of this thread wait for the results.
  void block_current_streams();
  void keep_alive(const at::Tensor& tensor) const;

 private:
  c10::Device device_;
  c10::Stream stream_;
  c10::Event issued_;
  c10::Event done_;
};

// Around the body of an operation: autograd must not see the copies, and they must be on the right
// stream. Costs nothing for host tensors.
class Session {
 public:
  explicit Session(DeviceStreams* device);
  // Call when all inputs are loaded, before MPI touches memory.
  void inputs_loaded();
  // Call after the outputs were stored.
  void outputs_stored();

 private:
  DeviceStreams* device_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  std::unique_ptr<c10::StreamGuard> stream_;
};

// A dense image of a tensor, in the tensor's own memory where possible.
class Dense {
 public:
  Dense() = default;
  Dense(at::Tensor tensor, bool stage) : tensor_(std::move(tensor)), stage_(stage) {}
  Dense(Dense&&) = default;
  Dense& operator=(Dense&&) = default;
  // When an operation was given up MPI may still write here: the copy is leaked on purpose.
  ~Dense();

  // Memory with the tensor's content.
  char* load();
  // Memory for its content to come.
  char* space();
  // Brings the memory's content into the tensor, if it is not there.
  void store();

  int64_t bytes() const {
    return static_cast<int64_t>(tensor_.nbytes());
  }

 private:
  bool in_place() const;
  void make_copy();

  at::Tensor tensor_;
  at::Tensor copy_;
  bool stage_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

std::vector<Dense> dense_list(const std::vector<at::Tensor>& tensors, bool stage);
enum class Content { Load, Space };
Blocks blocks_of(std::vector<Dense>& list, Content content);
void store_all(std::vector<Dense>& list);

// Device tensors and an MPI that cannot read them. Warns once and names the remedy.
bool must_stage(const at::Tensor& tensor);

inline bool plain_host(const at::Tensor& t) {
  return t.device().is_cpu() && t.is_contiguous() && !t.is_conj() && !t.is_neg();
}

} // namespace torch_mpi
