#include "tensor_memory.hpp"

#include "runtime.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_mpi {

using c10::impl::VirtualGuardImpl;

std::shared_ptr<DeviceStreams> DeviceStreams::of(const at::Tensor& tensor) {
  return tensor.device().is_cpu() ? nullptr : std::make_shared<DeviceStreams>(tensor.device());
}

DeviceStreams::DeviceStreams(c10::Device device)
    : device_(device),
      stream_(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
      issued_(device.type()),
      done_(device.type()) {
  issued_.record(VirtualGuardImpl(device.type()).getStream(device));
}

std::unique_ptr<c10::StreamGuard> DeviceStreams::enter() const {
  return std::make_unique<c10::StreamGuard>(stream_);
}

void DeviceStreams::follow_caller() {
  issued_.block(stream_);
}

void DeviceStreams::wait_on_host() {
  c10::Event reached(device_.type());
  reached.record(stream_);
  reached.synchronize();
}

void DeviceStreams::mark_done() {
  done_.record(stream_);
}

void DeviceStreams::block_current_streams() {
  done_.block(VirtualGuardImpl(device_.type()).getStream(device_));
}

void DeviceStreams::keep_alive(const at::Tensor& tensor) const {
  VirtualGuardImpl(device_.type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
}

Session::Session(DeviceStreams* device) : device_(device) {
  if (device_ != nullptr) {
    stream_ = device_->enter();
    device_->follow_caller();
  }
}

void Session::inputs_loaded() {
  if (device_ != nullptr) {
    device_->wait_on_host();
  }
}

void Session::outputs_stored() {
  if (device_ != nullptr) {
    device_->mark_done();
  }
}

Dense::~Dense() {
  if (copy_.defined() && std::uncaught_exceptions() > exceptions_) {
    new at::Tensor(std::move(copy_));
  }
}

bool Dense::in_place() const {
  return !stage_ && tensor_.is_contiguous() && !tensor_.is_conj() && !tensor_.is_neg();
}

void Dense::make_copy() {
  auto options = tensor_.options().memory_format(c10::MemoryFormat::Contiguous);
  if (stage_) {
    options = options.device(c10::kCPU).pinned_memory(true);
  }
  copy_ = at::empty(tensor_.sizes(), options);
}

char* Dense::load() {
  if (in_place()) {
    return static_cast<char*>(tensor_.data_ptr());
  }
  make_copy();
  copy_.copy_(tensor_, /*non_blocking=*/stage_);
  return static_cast<char*>(copy_.data_ptr());
}

char* Dense::space() {
  if (in_place()) {
    return static_cast<char*>(tensor_.data_ptr());
  }
  make_copy();
  return static_cast<char*>(copy_.data_ptr());
}

void Dense::store() {
  if (copy_.defined()) {
    tensor_.copy_(copy_, /*non_blocking=*/stage_);
  }
}

std::vector<Dense> dense_list(const std::vector<at::Tensor>& tensors, bool stage) {
  std::vector<Dense> list;
  list.reserve(tensors.size());
  for (const auto& t : tensors) {
    list.emplace_back(t, stage);
  }
  return list;
}

Blocks blocks_of(std::vector<Dense>& list, Content content) {
  Blocks blocks(static_cast<int>(list.size()));
  for (size_t i = 0; i < list.size(); ++i) {
    blocks.data[i] = content == Content::Load ? list[i].load() : list[i].space();
    blocks.bytes[i] = list[i].bytes();
  }
  return blocks;
}

void store_all(std::vector<Dense>& list) {
  for (auto& dense : list) {
    dense.store();
  }
}

bool must_stage(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) {
    return false;
  }
  const auto& runtime = Runtime::instance();
  if (tensor.device().is_cuda() && runtime.cuda_aware()) {
    return false;
  }
  static const bool warned = [&] {
    TORCH_WARN(
        "mpi: ", runtime.library(), " cannot read ", tensor.device().type(),
        " memory: tensors are copied through pinned host memory. For direct transfers use an MPI "
        "built with CUDA support (Open MPI: configure --with-cuda; `ompi_info --parsable --all | "
        "grep mpi_built_with_cuda_support:value` must say true).");
    return true;
  }();
  (void)warned;
  return true;
}

} // namespace torch_mpi
