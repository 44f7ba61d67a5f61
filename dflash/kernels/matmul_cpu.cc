// Product of rows with a matrix on a CPU, called through XLA's foreign function interface.
//
// The matrix is read once for up to six rows, and prefetched, so the product of a few rows takes
// little longer than reading the matrix. Each element is summed in an order that does not depend on
// the number of rows: a row has the same result, bit for bit, whatever rows are beside it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "threads_cpu.h"
#include "vectors_cpu.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dflash {
namespace {

// Vectors of columns, or columns of a transposed matrix, that are summed at once. With AVX-512 there
// are registers for the sums of six rows and four vectors, with AVX for those of two.
constexpr int kVectors = kLanes == 8 ? 2 : 4;
constexpr int kBlock = kLanes * kVectors;
constexpr int64_t kTileBytes = 1 << 17;  // of the matrix, which stay in near memory for all rows
constexpr int64_t kAhead = 16;  // rows of the matrix between a read and its prefetch

// A product y [rows, columns] = x [rows, depth] @ w, w [depth, columns], [columns, depth], or panels
// [columns / width, depth, width] of `width` columns each.
template <typename Weight>
struct Product {
  const float* x;
  const Weight* w;
  float* y;
  int64_t rows, depth, columns;
  int64_t width;  // columns of a panel; without panels, all

  // Index of the first element of a column, whose elements are `width` apart.
  int64_t Place(int64_t column) const { return column / width * width * depth + column % width; }
};

// Computes V vectors of columns, from `column` on, of R rows; w is [depth, columns] or panels.
template <int R, int V, bool kPrefetch, typename Weight>
inline void Columns(const Product<Weight>& p, int64_t row, int64_t column) {
  Floats sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = Floats{};
  const float* x = p.x + row * p.depth;
  const Weight* w = p.w + p.Place(column);
  // Behind the last row, the next columns are read.
  const int64_t next = p.Place(column + V * kLanes) - p.Place(column) - p.depth * p.width;
  for (int64_t k = 0; k < p.depth; ++k, w += p.width) {
    if constexpr (kPrefetch) {
      const int64_t ahead = kAhead * p.width + (k + kAhead < p.depth ? 0 : next);
      const char* next = reinterpret_cast<const char*>(w + ahead);
#pragma GCC unroll 8
      for (int byte = 0; byte < V * kLanes * int{sizeof(Weight)}; byte += 64)
        __builtin_prefetch(next + byte);
    }
    Floats weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) weights[v] = Load(w + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float factor = x[r * p.depth + k];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) AddProduct(sums[r][v], factor, weights[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      std::memcpy(p.y + (row + r) * p.columns + column + v * kLanes, &sums[r][v],
                  sizeof(Floats));
}

// Computes C columns, from `column` on, of R rows; w is [columns, depth].
template <int R, int C, bool kPrefetch, typename Weight>
inline void Transposed(const Product<Weight>& p, int64_t row, int64_t column) {
  constexpr int kSums = (R * C + kLanes - 1) / kLanes * kLanes;
  Floats sums[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sums[i] = Floats{};
  const float* x = p.x + row * p.depth;
  const Weight* w = p.w + column * p.depth;
  int64_t k = 0;
  for (; k + kLanes <= p.depth; k += kLanes) {
    Floats weights[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      if constexpr (kPrefetch) __builtin_prefetch(w + (c + C) * p.depth + k);
      weights[c] = Load(w + c * p.depth + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats factors = Load(x + r * p.depth + k);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) AddProduct(sums[r * C + c], factors, weights[c]);
    }
  }
  float totals[kSums];
  Sums<kSums>(sums, totals);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float total = totals[r * C + c];
      for (int64_t rest = k; rest < p.depth; ++rest)
        total = __builtin_fmaf(x[r * p.depth + rest], LoadOne(w[c * p.depth + rest]), total);
      p.y[(row + r) * p.columns + column + c] = total;
    }
}

// Computes columns [begin, end) of R rows.
template <int R, bool kPrefetch, typename Weight>
void Rows(const Product<Weight>& p, bool transposed, int64_t row, int64_t begin, int64_t end) {
  int64_t column = begin;
  if (transposed) {
    for (; column + kVectors <= end; column += kVectors)
      Transposed<R, kVectors, kPrefetch>(p, row, column);
    for (; column < end; ++column) Transposed<R, 1, kPrefetch>(p, row, column);
    return;
  }
  for (; column + kBlock <= end; column += kBlock)
    Columns<R, kVectors, kPrefetch>(p, row, column);
  for (; column + kLanes <= end; column += kLanes) Columns<R, 1, kPrefetch>(p, row, column);
  for (; column < end; ++column)
    for (int r = row; r < row + R; ++r) {
      float total = 0;
      for (int64_t k = 0; k < p.depth; ++k)
        total = __builtin_fmaf(p.x[r * p.depth + k], LoadOne(p.w[p.Place(column) + k * p.width]), total);
      p.y[r * p.columns + column] = total;
    }
}

// Computes columns [begin, end) of all rows, in groups of about equal size.
template <typename Weight>
void Groups(const Product<Weight>& p, bool transposed, int64_t begin, int64_t end) {
  const int64_t groups = (p.rows + kRows - 1) / kRows;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t row = p.rows * group / groups;
    const int64_t size = p.rows * (group + 1) / groups - row;
    const auto run = [&](auto rows) {
      if (group == 0) {
        Rows<rows(), true>(p, transposed, row, begin, end);
      } else {
        Rows<rows(), false>(p, transposed, row, begin, end);
      }
    };
    WithRows(size, run);
  }
}

// Computes columns [begin, end) of all rows, tile by tile if there are several groups of rows.
template <typename Weight>
void Tiles(const Product<Weight>& p, bool transposed, int64_t begin, int64_t end) {
  const int64_t column_bytes = p.depth * int64_t{sizeof(Weight)};
  const int64_t blocks = std::max<int64_t>(kTileBytes / (column_bytes * kBlock), 1);
  const int64_t columns = p.rows > kRows ? blocks * kBlock : end - begin;
  for (int64_t tile = begin; tile < end; tile += columns)
    Groups(p, transposed, tile, std::min(end, tile + columns));
}

constexpr int64_t kPartElements = 1 << 16;  // of the matrix, at least, in a part of the work

template <typename Weight>
void Multiply(ffi::ThreadPool& pool, const Product<Weight>& product, bool transposed) {
  const int64_t blocks = (product.columns + kBlock - 1) / kBlock;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t size = product.columns * product.depth;
  const int64_t wanted = std::min({blocks, 8 * threads, size / kPartElements});
  const int64_t parts = threads == 1 ? 1 : std::max<int64_t>(wanted, 1);
  const auto work = [&](int64_t part) {
    const int64_t begin = blocks * part / parts * kBlock;
    const int64_t end = std::min(product.columns, blocks * (part + 1) / parts * kBlock);
    Tiles(product, transposed, begin, end);
  };
  if (parts == 1) {
    work(0);
  } else {
    Spread(pool, parts, work);
  }
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::ResultBuffer<ffi::F32> y, bool transposed) {
  const auto shape = w.dimensions();
  const bool panels = shape.size() == 3;
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1];
  const int64_t width = panels ? shape[2] : shape[transposed ? 0 : 1];
  const int64_t columns = panels ? shape[0] * width : width;
  const auto multiply = [&](auto* weights) {
    using Weight = std::remove_pointer_t<decltype(weights)>;
    const Product<Weight> product{x.typed_data(), weights, y->typed_data(), rows, depth, columns, width};
    Multiply(pool, product, transposed);
    return ffi::Error::Success();
  };
  switch (w.element_type()) {
    case ffi::F32: return multiply(static_cast<float*>(w.untyped_data()));
    case ffi::BF16: return multiply(static_cast<Bfloat16*>(w.untyped_data()));
    case ffi::S8: return multiply(static_cast<int8_t*>(w.untyped_data()));
    default: return ffi::Error::InvalidArgument("weights are not float32, bfloat16 or int8");
  }
}

}  // namespace
}  // namespace dflash

// Returns the number of columns of a panel: the kernel reads panels of this width in order.
extern "C" int DflashPanelColumns() { return dflash::kBlock; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashMatmul, dflash::Handle,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed"));
