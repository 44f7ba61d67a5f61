// Vectors of floats, and how elements of other types are read as floats.

#ifndef DFLASH_KERNELS_VECTORS_CPU_H_
#define DFLASH_KERNELS_VECTORS_CPU_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace dflash {

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // floats per vector
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));

enum class Bfloat16 : uint16_t {};

// Reads consecutive elements as float32.
template <typename Weight>
inline Floats Load(const Weight* from) {
  if constexpr (std::is_same_v<Weight, float>) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
  } else if constexpr (std::is_same_v<Weight, Bfloat16>) {
    using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
    using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats values;
    std::memcpy(&values, &words, sizeof values);
    return values;
  } else {
    using Bytes = int8_t __attribute__((vector_size(kLanes)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Floats);
  }
}

template <typename Weight>
inline float LoadOne(Weight weight) {
  if constexpr (std::is_same_v<Weight, Bfloat16>) {
    const uint32_t word = static_cast<uint32_t>(weight) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return static_cast<float>(weight);
  }
}

// Adds a · b to a sum, rounded once on x86 processors with FMA. For `sum += a * b` compilers choose in
// each loop, so that sums would depend on the number of rows: GCC rounds twice where a loop has a
// single sum and it tunes for AMD's Zen.
inline void AddProduct(Floats& sum, const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  sum = (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  sum = (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  sum += a * b;
#endif
}

inline void AddProduct(Floats& sum, float a, const Floats& b) {
#if defined(__AVX512F__)
  AddProduct(sum, (Floats)_mm512_set1_ps(a), b);
#elif defined(__FMA__)
  AddProduct(sum, (Floats)_mm256_set1_ps(a), b);
#else
  sum += a * b;
#endif
}

// Returns lanes of two vectors: number l of the result is lane index[l] of a, or of b from kLanes on.
template <int... index>
inline Floats Shuffle(const Floats& a, const Floats& b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, index...);
#else
  using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
  constexpr Ints mask = {index...};
  return __builtin_shuffle(a, b, mask);
#endif
}

// Interleaves the first halves of two vectors, or the second halves: a[0] b[0] a[1] b[1] …
template <int half, int... lanes>
inline Floats Interleave(const Floats& a, const Floats& b, std::integer_sequence<int, lanes...>) {
  return Shuffle<(half * kLanes / 2 + lanes / 2 + lanes % 2 * kLanes)...>(a, b);
}

// Transposes kLanes × kLanes floats in place.
inline void Transpose(Floats (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    Floats mixed[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = Interleave<0>(rows[i], rows[i + kLanes / 2], lanes);
      mixed[2 * i + 1] = Interleave<1>(rows[i], rows[i + kLanes / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

using Four = float __attribute__((vector_size(16)));
using Eight = float __attribute__((vector_size(32)));

// Adds the two halves of a vector.
template <typename Half, typename Vector>
inline Half Fold(const Vector& vector) {
  Half low, high;
  std::memcpy(&low, &vector, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&vector) + sizeof low, sizeof high);
  return low + high;
}

inline float Sum(const Floats& vector) {
  Four four;
  if constexpr (kLanes == 16) {
    four = Fold<Four>(Fold<Eight>(vector));
  } else if constexpr (kLanes == 8) {
    four = Fold<Four>(vector);
  } else {
    std::memcpy(&four, &vector, sizeof four);
  }
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Adds the first and the second half of each piece of 2 · `half` lanes, of a and then of b.
template <int half, int... lanes>
inline Floats FoldBoth(const Floats& a, const Floats& b, std::integer_sequence<int, lanes...>) {
  // The place of a piece's first half, in a or in b.
  constexpr auto place = [](int lane) {
    const int rest = lane % (kLanes / 2);
    return lane / (kLanes / 2) * kLanes + rest / half * 2 * half + rest % half;
  };
  return Shuffle<place(lanes)...>(a, b) + Shuffle<(place(lanes) + half)...>(a, b);
}

// Writes the sums of `count` vectors, each the same as by Sum; `count` is a multiple of kLanes.
template <int count, int half = kLanes / 2>
inline void Sums(const Floats* vectors, float* sums) {
  if constexpr (half == 0) {
    std::memcpy(sums, vectors, count * kLanes * sizeof(float));
  } else {
    Floats folded[count / 2];
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; ++i)
      folded[i] = FoldBoth<half>(vectors[2 * i], vectors[2 * i + 1],
                                 std::make_integer_sequence<int, kLanes>());
    Sums<count / 2, half / 2>(folded, sums);
  }
}

constexpr int kRows = 6;  // rows that are computed at once, at most

// Calls run with an integral constant, the number of rows from 1 to kRows.
template <typename Run>
inline void WithRows(int64_t rows, const Run& run) {
  switch (rows) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    default: return run(std::integral_constant<int, kRows>());
  }
}

}  // namespace dflash

#endif  // DFLASH_KERNELS_VECTORS_CPU_H_
