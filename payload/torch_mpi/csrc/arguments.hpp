// What the collectives ask of the tensors that they are given.
#pragma once

#include "backend.hpp"

namespace torch_mpi {

// torch passes a list for the several devices that a rank once had; now it holds one tensor.
inline const at::Tensor& only(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(
      tensors.size() == 1, "mpi ", name, ": one tensor a rank is supported, got ", tensors.size());
  return tensors[0];
}

// Which memory MPI will see: a staged tensor is on the host, wherever it came from.
inline Memory memory_kind(const at::Tensor& t, bool staged) {
  return t.device().is_cpu() || staged ? Memory::Host : Memory::Device;
}

inline int64_t total_bytes(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& t : tensors) {
    bytes += static_cast<int64_t>(t.nbytes());
  }
  return bytes;
}

} // namespace torch_mpi
