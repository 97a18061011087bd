// How torch's dtypes and reductions are spelled in MPI.
#pragma once

#include <mpi.h>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>

namespace torch_mpi {

enum class ReduceKind : uint8_t { Sum, Prod, Min, Max, BitAnd, BitOr, BitXor };

// What is reduced and how. `acc` is the type that the sum is kept in: float for half and bfloat16,
// the dtype itself otherwise. `divisor` is the group's size for AVG and 1 for all other operations.
struct Reduction {
  at::ScalarType dtype;
  at::ScalarType acc;
  ReduceKind kind;
  int64_t divisor = 1;

  size_t item_bytes() const {
    return c10::elementSize(dtype);
  }
  size_t acc_bytes() const {
    return c10::elementSize(acc);
  }
  bool widened() const {
    return dtype != acc;
  }
};

// Throws ValueError (c10::ValueError) with the dtype's and operation's name where torch's other
// backends reject the pair as well: bit operations on floats, order on complex, float8 sums.
Reduction make_reduction(const c10d::ReduceOp& op, at::ScalarType dtype, int group_size);

MPI_Datatype mpi_type(at::ScalarType dtype);
MPI_Op mpi_op(ReduceKind kind);

const char* reduce_op_name(const c10d::ReduceOp& op);

} // namespace torch_mpi
