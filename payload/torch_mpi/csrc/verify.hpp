// TORCH_DISTRIBUTED_DEBUG=DETAIL: before a collective runs, all ranks compare what they are about
// to do. Without it a mismatch is at best an MPI error on one rank and silently wrong data on the
// other.
#pragma once

#include "waiting.hpp"

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace torch_mpi {

// "float32 [2, 3]"
std::string describe_tensor(const at::Tensor& tensor);
std::string describe_tensors(const std::vector<at::Tensor>& tensors);

// "allreduce(SUM, float32 [2, 3])", cut to what is exchanged.
std::string describe_call(const char* name, const std::string& arguments);

// Throws Refused on every rank when not all ranks describe the same call.
void verify_same_call(Waiter& w, const std::string& what);

} // namespace torch_mpi
