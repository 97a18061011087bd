// The loops of kernels.cpp, included once for each instruction set inside a namespace of its own.
// No include guard and no includes on purpose: see kernels.cpp.

// Integer sums wrap as torch's do; signed overflow would be undefined in C++.
template <typename T>
using Wrap = typename std::conditional_t<
    std::is_integral_v<T>,
    std::make_unsigned<T>,
    std::common_type<T>>::type;

struct SumOp {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<Wrap<T>>(a) + static_cast<Wrap<T>>(b));
  }
};
struct ProdOp {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(int)) {
      // uint16_t * uint16_t would be promoted to (signed) int and may overflow it.
      return static_cast<T>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
    } else {
      return static_cast<T>(static_cast<Wrap<T>>(a) * static_cast<Wrap<T>>(b));
    }
  }
};
// A NaN on any rank is the result on all ranks, as in torch.minimum and torch.maximum.
struct MinOp {
  template <typename T>
  static T apply(T a, T b) {
    return (a != a || a < b) ? a : b;
  }
};
struct MaxOp {
  template <typename T>
  static T apply(T a, T b) {
    return (a != a || a > b) ? a : b;
  }
};
struct AndOp {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct OrOp {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct XorOp {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename T, typename Op>
void combine_loop(T* acc, const T* left, const T* right, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    acc[i] = Op::apply(left[i], right[i]);
  }
}

template <typename T>
void combine_typed(ReduceKind kind, T* acc, const T* left, const T* right, int64_t count) {
  constexpr bool is_complex = !std::is_arithmetic_v<T>;
  switch (kind) {
    case ReduceKind::Sum:
      return combine_loop<T, SumOp>(acc, left, right, count);
    case ReduceKind::Prod:
      return combine_loop<T, ProdOp>(acc, left, right, count);
    case ReduceKind::Min:
      if constexpr (!is_complex) {
        return combine_loop<T, MinOp>(acc, left, right, count);
      }
      break;
    case ReduceKind::Max:
      if constexpr (!is_complex) {
        return combine_loop<T, MaxOp>(acc, left, right, count);
      }
      break;
    default:
      if constexpr (std::is_integral_v<T>) {
        if (kind == ReduceKind::BitAnd) {
          return combine_loop<T, AndOp>(acc, left, right, count);
        }
        if (kind == ReduceKind::BitOr) {
          return combine_loop<T, OrOp>(acc, left, right, count);
        }
        return combine_loop<T, XorOp>(acc, left, right, count);
      }
  }
}

template <typename T>
void divide(T* x, int64_t count, int64_t divisor) {
  if constexpr (std::is_integral_v<T>) {
    const T d = static_cast<T>(divisor);
    for (int64_t i = 0; i < count; ++i) {
      x[i] = static_cast<T>(x[i] / d);
    }
  } else {
    const T d(static_cast<double>(divisor));
    for (int64_t i = 0; i < count; ++i) {
      x[i] = x[i] / d;
    }
  }
}

inline void bf16_to_float(float* out, const uint16_t* in, int64_t count) {
  int64_t i = 0;
#ifdef TORCH_MPI_F16C
  for (; i + 8 <= count; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
    _mm256_storeu_ps(out + i, _mm256_castsi256_ps(bits));
  }
#endif
  for (; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
    __builtin_memcpy(&out[i], &bits, sizeof(bits));
  }
}

#ifdef TORCH_MPI_F16C
// Eight floats as bfloat16 in the low halves of 32-bit lanes; the scalar loop below says how.
inline __m256i round_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, nan, is_nan);
}
#endif

inline void float_to_bf16(uint16_t* out, const float* in, int64_t count) {
  int64_t i = 0;
#ifdef TORCH_MPI_F16C
  for (; i + 16 <= count; i += 16) {
    const __m256i low = round_to_bf16(_mm256_loadu_ps(in + i));
    const __m256i high = round_to_bf16(_mm256_loadu_ps(in + i + 8));
    // packus works within 128-bit lanes: the permutation puts the four quarters in order.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), packed);
  }
#endif
  for (; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, &in[i], sizeof(bits));
    // Round to nearest, ties to even; a NaN keeps its top bits and stays a NaN.
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    out[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
}

inline void half_to_float(float* out, const uint16_t* in, int64_t count) {
  int64_t i = 0;
#ifdef TORCH_MPI_F16C
  for (; i + 8 <= count; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(h));
  }
#endif
  for (; i < count; ++i) {
    out[i] = c10::detail::fp16_ieee_to_fp32_value(in[i]);
  }
}

inline void float_to_half(uint16_t* out, const float* in, int64_t count) {
  int64_t i = 0;
#ifdef TORCH_MPI_F16C
  for (; i + 8 <= count; i += 8) {
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), h);
  }
#endif
  for (; i < count; ++i) {
    out[i] = c10::detail::fp16_ieee_from_fp32_value(in[i]);
  }
}

template <typename F>
void for_acc_type(at::ScalarType acc, F&& f) {
  switch (acc) {
    case at::ScalarType::Float:
      return f(float());
    case at::ScalarType::Double:
      return f(double());
    case at::ScalarType::Byte:
    case at::ScalarType::Bool:
      return f(uint8_t());
    case at::ScalarType::Char:
      return f(int8_t());
    case at::ScalarType::Short:
      return f(int16_t());
    case at::ScalarType::Int:
      return f(int32_t());
    case at::ScalarType::Long:
      return f(int64_t());
    case at::ScalarType::UInt16:
      return f(uint16_t());
    case at::ScalarType::UInt32:
      return f(uint32_t());
    case at::ScalarType::UInt64:
      return f(uint64_t());
    case at::ScalarType::ComplexFloat:
      return f(c10::complex<float>());
    case at::ScalarType::ComplexDouble:
      return f(c10::complex<double>());
    default:
      TORCH_INTERNAL_ASSERT(false, "no reduction kernel for ", acc);
  }
}

inline void widen_here(const Reduction& r, void* acc, const void* src, int64_t count) {
  if (r.dtype == at::ScalarType::BFloat16) {
    bf16_to_float(static_cast<float*>(acc), static_cast<const uint16_t*>(src), count);
  } else if (r.dtype == at::ScalarType::Half) {
    half_to_float(static_cast<float*>(acc), static_cast<const uint16_t*>(src), count);
  } else if (acc != src) {
    __builtin_memcpy(acc, src, count * r.item_bytes());
  }
}

inline void combine_here(
    const Reduction& r, void* acc, const void* left, const void* right, int64_t count) {
  for_acc_type(r.acc, [&](auto tag) {
    using T = decltype(tag);
    combine_typed<T>(
        r.kind, static_cast<T*>(acc), static_cast<const T*>(left), static_cast<const T*>(right), count);
  });
}

// Divides acc in place first, which is why it is not const here.
inline void narrow_here(const Reduction& r, void* dst, void* acc, int64_t count) {
  if (r.divisor != 1) {
    for_acc_type(r.acc, [&](auto tag) {
      divide(static_cast<decltype(tag)*>(acc), count, r.divisor);
    });
  }
  if (r.dtype == at::ScalarType::BFloat16) {
    float_to_bf16(static_cast<uint16_t*>(dst), static_cast<const float*>(acc), count);
  } else if (r.dtype == at::ScalarType::Half) {
    float_to_half(static_cast<uint16_t*>(dst), static_cast<const float*>(acc), count);
  } else if (acc != dst) {
    __builtin_memcpy(dst, acc, count * r.item_bytes());
  }
}

inline void reduce_many_here(
    const Reduction& r, void* dst, const void* const* srcs, int n, int64_t count) {
  // Tiles small enough to stay in the first-level cache: each source is read from memory once and
  // the result is written once, however many sources there are.
  constexpr int64_t kTileBytes = 4096;
  const int64_t tile = kTileBytes / static_cast<int64_t>(r.acc_bytes());
  alignas(64) char acc[kTileBytes];
  alignas(64) char next[kTileBytes];
  const auto item = r.item_bytes();
  for (int64_t start = 0; start < count; start += tile) {
    const int64_t len = std::min(tile, count - start);
    const auto at = [&](const void* p) { return static_cast<const char*>(p) + start * item; };
    char* out = static_cast<char*>(dst) + start * item;
    if (n == 1) {
      widen_here(r, acc, at(srcs[0]), len);
    } else if (!r.widened()) {
      // Straight from the sources; the tile is only needed when there is something to divide.
      combine_here(r, acc, at(srcs[0]), at(srcs[1]), len);
      for (int s = 2; s < n; ++s) {
        combine_here(r, acc, acc, at(srcs[s]), len);
      }
    } else {
      widen_here(r, acc, at(srcs[0]), len);
      for (int s = 1; s < n; ++s) {
        widen_here(r, next, at(srcs[s]), len);
        combine_here(r, acc, acc, next, len);
      }
    }
    narrow_here(r, out, acc, len);
  }
}
