// Builds kernels_impl.hpp twice, for the baseline of the architecture and for AVX2 with F16C, and
// picks one at run time: an image is built on one machine and runs on others. All headers are
// included before the target is switched, so no library code is compiled for the wrong CPU.
#include "kernels.hpp"

#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torch_mpi {

namespace baseline {
#include "kernels_impl.hpp"
} // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define TORCH_MPI_F16C
namespace avx2 {
#include "kernels_impl.hpp"
} // namespace avx2
#undef TORCH_MPI_F16C
#pragma GCC pop_options

namespace {
const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
    __builtin_cpu_supports("f16c");
} // namespace
#else
namespace avx2 = baseline;
namespace {
constexpr bool has_avx2 = false;
} // namespace
#endif

void reduce_many(const Reduction& r, void* dst, const void* const* srcs, int n, int64_t count) {
  has_avx2 ? avx2::reduce_many_here(r, dst, srcs, n, count)
           : baseline::reduce_many_here(r, dst, srcs, n, count);
}

void widen(const Reduction& r, void* acc, const void* src, int64_t count) {
  has_avx2 ? avx2::widen_here(r, acc, src, count) : baseline::widen_here(r, acc, src, count);
}

void combine(const Reduction& r, void* acc, const void* left, const void* right, int64_t count) {
  has_avx2 ? avx2::combine_here(r, acc, left, right, count)
           : baseline::combine_here(r, acc, left, right, count);
}

void narrow(const Reduction& r, void* dst, void* acc, int64_t count) {
  has_avx2 ? avx2::narrow_here(r, dst, acc, count) : baseline::narrow_here(r, dst, acc, count);
}

} // namespace torch_mpi
