// Assembly of parameters and checks for non-finite numbers on a CPU, called through XLA's foreign
// function interface.
//
// A transposed matrix is copied in tiles of whole cache lines, so that each line is read once and
// written once. Written lines bypass the cache: the memory that they overwrite is not read.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "vectors_cpu.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dflash {
namespace {

constexpr int kLine = 16;  // floats per cache line
constexpr int kBand = 4 * kLine;  // rows that are copied in turn, so that few pages are in use
constexpr int kVectors = 4;  // vectors that are summed at once

// Writes a vector; past the cache if kStream, where `to` must be aligned to vectors.
template <bool kStream>
inline void Store(float* to, const Floats& values) {
  if constexpr (kStream) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)values);
    return;
#elif defined(__AVX__)
    _mm256_stream_ps(to, (__m256)values);
    return;
#elif defined(__SSE2__)
    _mm_stream_ps(to, (__m128)values);
    return;
#endif
  }
  std::memcpy(to, &values, sizeof values);
}

// Waits until streamed vectors are visible to other threads.
inline void Fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Copies kLanes × kLanes floats, transposed.
template <bool kStream>
inline void CopyTransposed(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Floats rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = Load(from + i * from_stride);
  Transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) Store<kStream>(to + i * to_stride, rows[i]);
}

// A matrix whose element (i, j) goes from from[i * from_row + j * from_column] to
// to[i * to_row + j].
struct Matrix {
  const float* from;
  float* to;
  int64_t rows, columns, from_row, from_column, to_row;
};

inline void CopyElements(const Matrix& m, int64_t row, int64_t column, int64_t end_row) {
  for (int64_t i = row; i < end_row; ++i)
    for (int64_t j = column; j < m.columns; ++j)
      m.to[i * m.to_row + j] = m.from[i * m.from_row + j * m.from_column];
}

// Copies a matrix of which columns are consecutive.
template <bool kStream>
void CopyColumns(const Matrix& m) {
  const int64_t rows = m.rows / kLine * kLine, columns = m.columns / kLine * kLine;
  for (int64_t band = 0; band < rows; band += kBand) {
    const int64_t end = std::min(rows, band + kBand);
    for (int64_t column = 0; column < columns; column += kLine) {
      const float* from = m.from + column * m.from_column;
      for (int64_t row = band; row < end; row += kLine)
        for (int j = kLine; j < 2 * kLine; ++j)  // the next columns
          __builtin_prefetch(from + j * m.from_column + row);
      for (int64_t row = band; row < end; row += kLanes)
        for (int j = 0; j < kLine; j += kLanes)
          CopyTransposed<kStream>(from + j * m.from_column + row, m.from_column,
                             m.to + row * m.to_row + column + j, m.to_row);
    }
  }
  CopyElements(m, rows, 0, m.rows);
  CopyElements(m, 0, columns, rows);
}

// Copies a matrix of which rows are consecutive.
template <bool kStream>
void CopyRows(const Matrix& m) {
  for (int64_t row = 0; row < m.rows; ++row) {
    const float* from = m.from + row * m.from_row;
    float* to = m.to + row * m.to_row;
    int64_t column = 0;
    for (; column + kLanes <= m.columns; column += kLanes) {
      __builtin_prefetch(from + m.from_row + column);
      Store<kStream>(to + column, Load(from + column));
    }
    for (; column < m.columns; ++column) to[column] = from[column];
  }
}

void Copy(const Matrix& m) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(m.to) % (4 * kLine) == 0;
  const bool stream = is_aligned && m.to_row % kLine == 0;
  if (m.from_column == 1) {
    stream ? CopyRows<true>(m) : CopyRows<false>(m);
  } else {
    stream ? CopyColumns<true>(m) : CopyColumns<false>(m);
  }
}

// Copies parts side by side to a matrix [D, F], or to its panels [F / W, D, W]. A part is a
// transposed matrix, or one layer of an array [D, layers, …] or [N, layers, D / N, …].
ffi::Error Assemble(ffi::RemainingArgs parts, ffi::ResultBuffer<ffi::F32> y, bool transposed,
                    int64_t layer, int64_t layers) {
  const auto shape = y->dimensions();
  const int64_t width = shape.back(), rows = shape[shape.size() - 2];
  int64_t begin = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto part = parts.get<ffi::Buffer<ffi::F32>>(i);
    if (part.has_error()) return part.error();
    const int64_t columns = static_cast<int64_t>(part->element_count()) / layers / rows;
    // Rows are consecutive in blocks, with those of the other layers in between.
    const int64_t block_rows = layers > 1 ? rows / part->dimensions()[0] : rows;
    const int64_t block = block_rows * columns;
    const int64_t from_row = transposed ? 1 : (block_rows > 1 ? 1 : layers) * columns;
    const int64_t from_column = transposed ? rows : 1;
    const int64_t step = transposed ? rows : 1;  // Read the rows of an array in order.
    for (int64_t row = 0; row < rows; row += step) {
      const float* from = part->typed_data() + (row / block_rows * layers + layer) * block +
                          row % block_rows * from_row;
      for (int64_t column = 0, count; column < columns; column += count) {
        const int64_t place = begin + column, first = place % width;
        count = std::min(width - first, columns - column);
        float* to = y->typed_data() + (place / width * rows + row) * width + first;
        Copy({from + column * from_column, to, step, count, from_row, from_column, width});
      }
    }
    begin += columns;
  }
  Fence();
  return ffi::Error::Success();
}

ffi::Error Finite(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::PRED> y) {
  const float* values = x.typed_data();
  const int64_t size = x.element_count();
  Floats sums[kVectors] = {};  // A NaN or an infinity becomes NaN in a product with zero.
  int64_t i = 0;
  for (; i + kVectors * kLanes <= size; i += kVectors * kLanes)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] += Load(values + i + v * kLanes) * 0.0f;
  float total = 0;
  for (; i < size; ++i) total += values[i] * 0.0f;
  for (const Floats& sum : sums)
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  y->typed_data()[0] = total == 0.0f;
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashAssemble, dflash::Assemble,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("layers"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashFinite, dflash::Finite,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>());
