// The arithmetic of reductions on host memory.
//
// MPI has no half precision, and a user-defined MPI_Op would round after every pair. Here all
// contributions of a block are added in the accumulation type (float for half and bfloat16) and
// rounded once, and the same loops serve every dtype.
#pragma once

#include "datatypes.hpp"

#include <cstddef>
#include <cstdint>

namespace torch_mpi {

// dst[i] = (srcs[0][i] op srcs[1][i] op …) / divisor, in the order of srcs, for `count` items of
// r.dtype. dst may be one of srcs.
void reduce_many(const Reduction& r, void* dst, const void* const* srcs, int n, int64_t count);

// The three steps apart, for algorithms that exchange partial results: into the accumulation type,
// acc = left op right there, and back (narrow divides acc in place for AVG).
void widen(const Reduction& r, void* acc, const void* src, int64_t count);
void combine(const Reduction& r, void* acc, const void* left, const void* right, int64_t count);
void narrow(const Reduction& r, void* dst, void* acc, int64_t count);

} // namespace torch_mpi
