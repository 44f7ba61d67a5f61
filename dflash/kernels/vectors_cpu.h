// Vectors of floats, and how elements of other types are read as floats.

#ifndef DFLASH_KERNELS_VECTORS_CPU_H_
#define DFLASH_KERNELS_VECTORS_CPU_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

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

}  // namespace dflash

#endif  // DFLASH_KERNELS_VECTORS_CPU_H_
