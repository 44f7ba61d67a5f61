// Attention of few rows to a cached context on a CPU, called through XLA's foreign function
// interface.
//
// A row's keys are those of the context and then the new rows that it sees, in this order. Scores,
// sums and outputs are computed key by key, in an order that depends on a key's number in this
// list alone: a row has the same result, bit for bit, whatever rows are beside it, and whether a
// key is new or in the context.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "threads_cpu.h"
#include "vectors_cpu.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dflash {
namespace {

constexpr int kVectors = 4;  // vectors of an output row that are summed at once
constexpr int64_t kBand = 24;  // rows that share a transposed block of keys
constexpr int64_t kSpreadProducts = 1 << 19;  // multiplications that more than one thread is worth

using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

// exp of numbers of at most 0, within 2 ulp; 0 below -87.
inline Floats Exp(const Floats& x) {
  const Floats zero{};
  const Floats bounded = x < -87.0f ? zero - 87.0f : x;
  const Ints power = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Ints);
  const Floats n = __builtin_convertvector(power, Floats);
  const Floats rest = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats sum = zero + 1.9875691500e-4f;
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                             1.6666665459e-1f, 5.0000001201e-1f})
    sum = sum * rest + factor;
  sum = sum * rest * rest + rest + 1.0f;
  Ints bits;
  std::memcpy(&bits, &sum, sizeof bits);
  bits += power << 23;
  std::memcpy(&sum, &bits, sizeof sum);
  return x < -87.0f ? zero : sum;
}

template <typename Key>
struct Attention {
  const float* queries;  // [B, T, N, H]
  const Key *keys, *values;  // [B, S, K, H]
  const Key *key_pages, *value_pages;  // [K, P, L, H]; not paged: [B, K, L, H]
  const int32_t* table;  // [B, M]
  const int32_t* length;  // [B]
  const int32_t* first;  // [B, T]
  const bool* visible;  // [B or 1, T, S]
  const float* sinks;  // [N]
  float* out;  // [B, T, N, H]
  int64_t batch, rows, heads, width, kv_heads, new_rows, pages, page_size, table_width, masks;
  bool paged, has_sinks;
  float scale;

  int64_t Group() const { return heads / kv_heads; }

  // Index of the first element of a page's row, for a KV head.
  int64_t Place(int64_t b, int64_t k, int64_t position) const {
    const int64_t page = paged ? table[b * table_width + position / page_size] : b;
    const int64_t block = paged ? k * pages + page : page * kv_heads + k;
    return (block * page_size + position % page_size) * width;
  }
  int64_t NewPlace(int64_t b, int64_t k, int64_t row) const {
    return ((b * new_rows + row) * kv_heads + k) * width;
  }
  // Index of the first element of a query: `row` counts the queries of a KV head.
  int64_t QueryPlace(int64_t b, int64_t k, int64_t row) const {
    return ((b * rows + row / Group()) * heads + k * Group() + row % Group()) * width;
  }
};

// Memory of one task.
struct Scratch {
  std::vector<float> scores;  // [rows, capacity]
  std::vector<float> new_scores;  // [rows, S, rounded up to vectors]
  std::vector<float> transposed;  // [H, kLanes]
  std::vector<float> sums;  // [rows, H]
  std::vector<float> peaks, totals;  // [rows]
  std::vector<int64_t> places;  // of the keys of the context
};

// Scores of R rows for a block of kLanes keys, transposed.
template <int R>
inline void BlockScores(const float* const* queries, const float* keys, int64_t width, float scale,
                        float* scores, int64_t stride) {
  Floats even[R], odd[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) even[r] = odd[r] = Floats{};
  for (int64_t h = 0; h < width; h += 2) {
    const Floats first = Load(keys + h * kLanes), second = Load(keys + (h + 1) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      AddProduct(even[r], queries[r][h], first);
      AddProduct(odd[r], queries[r][h + 1], second);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Floats result = (even[r] + odd[r]) * scale;
    std::memcpy(scores + r * stride, &result, sizeof result);
  }
}

// Adds weights [R, stride] times `count` values to sums [R, H], from column `column` on.
template <int R, int V, typename Key>
inline void AddValues(const float* weights, int64_t stride, const Key* values,
                      const int64_t* places, int64_t count, int64_t width, int64_t column,
                      float* sums) {
  Floats total[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) total[r][v] = Load(sums + r * width + column + v * kLanes);
  for (int64_t key = 0; key < count; ++key) {
    Floats value[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) value[v] = Load(values + places[key] + column + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float weight = weights[r * stride + key];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) AddProduct(total[r][v], weight, value[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      std::memcpy(sums + r * width + column + v * kLanes, &total[r][v], sizeof(Floats));
}

template <int R, typename Key>
inline void AddRows(const float* weights, int64_t stride, const Key* values, const int64_t* places,
                    int64_t count, int64_t width, float* sums) {
  int64_t column = 0;
  for (; column + kVectors * kLanes <= width; column += kVectors * kLanes)
    AddValues<R, kVectors>(weights, stride, values, places, count, width, column, sums);
  for (; column < width; column += kLanes)
    AddValues<R, 1>(weights, stride, values, places, count, width, column, sums);
}

// Attention of rows [begin, begin + count) of the queries of a sequence and KV head.
template <typename Key>
class Band {
 public:
  Band(const Attention<Key>& attention, Scratch& scratch, int64_t b, int64_t k, int64_t begin,
       int64_t count)
      : a_(attention), s_(scratch), b_(b), k_(k), begin_(begin), count_(count) {
    context_ = a_.length[b];
    int64_t first = context_;
    for (int64_t i = 0; i < count; ++i) first = std::min<int64_t>(first, First(i));
    // Blocks of keys begin at multiples of kLanes, whatever a row sees.
    from_ = std::max<int64_t>(first, 0) / kLanes * kLanes;
    stride_ = (context_ - from_ + a_.new_rows + kLanes) / kLanes * kLanes;
    new_stride_ = (a_.new_rows + kLanes - 1) / kLanes * kLanes;
    s_.scores.resize(count * stride_);
    s_.new_scores.resize(count * new_stride_);
    s_.transposed.resize(a_.width * kLanes);
    s_.sums.assign(count * a_.width, 0.0f);
    s_.totals.resize(count);
    s_.places.resize(std::max(context_ - from_, a_.new_rows));
  }

  void Run() {
    for (int64_t i = 0; i < a_.new_rows; ++i) s_.places[i] = a_.NewPlace(b_, k_, i);
    Score(a_.keys, a_.new_rows, s_.new_scores.data(), new_stride_);
    for (int64_t i = 0; i < context_ - from_; ++i) s_.places[i] = a_.Place(b_, k_, from_ + i);
    Score(a_.key_pages, context_ - from_, s_.scores.data(), stride_);
    for (int64_t i = 0; i < count_; ++i) Weigh(i);
    for (int64_t i = 0; i < count_; i += kRows)
      WithRows(std::min<int64_t>(kRows, count_ - i), [&](auto rows) {
        AddRows<rows()>(s_.scores.data() + i * stride_, stride_, a_.value_pages, s_.places.data(),
                        context_ - from_, a_.width, s_.sums.data() + i * a_.width);
      });
    for (int64_t i = 0; i < count_; ++i) Finish(i);
  }

 private:
  int64_t First(int64_t i) const { return a_.first[b_ * a_.rows + (begin_ + i) / a_.Group()]; }

  const bool* Visible(int64_t i) const {
    const int64_t mask = a_.masks == 1 ? 0 : b_;
    return a_.visible + (mask * a_.rows + (begin_ + i) / a_.Group()) * a_.new_rows;
  }

  // Computes the scores of all rows for `count` keys at s_.places.
  void Score(const Key* keys, int64_t count, float* scores, int64_t stride) {
    const float* queries[kBand];
    for (int64_t i = 0; i < count_; ++i)
      queries[i] = a_.queries + a_.QueryPlace(b_, k_, begin_ + i);
    for (int64_t block = 0; block < count; block += kLanes) {
      for (int64_t h = 0; h < a_.width; h += kLanes) {
        Floats rows[kLanes];
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane)
          rows[lane] = Load(keys + s_.places[std::min(block + lane, count - 1)] + h);
        Transpose(rows);
        std::memcpy(s_.transposed.data() + h * kLanes, rows, sizeof rows);
      }
      for (int64_t i = 0; i < count_; i += kRows)
        WithRows(std::min<int64_t>(kRows, count_ - i), [&](auto rows) {
          BlockScores<rows()>(queries + i, s_.transposed.data(), a_.width, a_.scale,
                              scores + i * stride + block, stride);
        });
    }
  }

  // Replaces the scores of a row by its weights, with those of the new rows that it sees behind
  // those of the context.
  void Weigh(int64_t i) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    float* scores = s_.scores.data() + i * stride_;
    const float* of_new = s_.new_scores.data() + i * new_stride_;
    const int64_t hidden = std::max<int64_t>(First(i) - from_, 0);
    std::fill(scores, scores + std::min(hidden, context_ - from_), kNone);
    int64_t end = context_ - from_;
    for (int64_t row = 0; row < a_.new_rows; ++row)
      if (Visible(i)[row]) scores[end++] = of_new[row];
    std::fill(scores + end, scores + stride_, kNone);
    Floats highest = Floats{} + kNone;
    for (int64_t key = 0; key < stride_; key += kLanes) {
      const Floats some = Load(scores + key);
      highest = some > highest ? some : highest;
    }
    const int64_t head = k_ * a_.Group() + (begin_ + i) % a_.Group();
    float peak = a_.has_sinks ? a_.sinks[head] : kNone;
    for (int lane = 0; lane < kLanes; ++lane) peak = std::max(peak, highest[lane]);
    Floats total{};
    for (int64_t key = 0; key < stride_; key += kLanes) {
      const Floats weights = Exp(Load(scores + key) - peak);
      std::memcpy(scores + key, &weights, sizeof weights);
      total += weights;
    }
    s_.totals[i] = Sum(total);
    if (a_.has_sinks) s_.totals[i] += Exp(Floats{} + (a_.sinks[head] - peak))[0];
  }

  // Adds the values of the new rows, and writes the outputs of a row.
  void Finish(int64_t i) {
    const float* weights = s_.scores.data() + i * stride_ + context_ - from_;
    float* sums = s_.sums.data() + i * a_.width;
    int64_t seen = 0;
    for (int64_t row = 0; row < a_.new_rows; ++row)
      if (Visible(i)[row]) s_.places[seen++] = a_.NewPlace(b_, k_, row);
    AddRows<1>(weights, stride_, a_.values, s_.places.data(), seen, a_.width, sums);
    float* out = a_.out + a_.QueryPlace(b_, k_, begin_ + i);
    for (int64_t h = 0; h < a_.width; ++h) out[h] = sums[h] / s_.totals[i];
  }

  const Attention<Key>& a_;
  Scratch& s_;
  const int64_t b_, k_, begin_, count_;
  int64_t context_, from_, stride_, new_stride_;
};

template <typename Key>
void Attend(ffi::ThreadPool& pool, const Attention<Key>& attention) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t rows = attention.rows * attention.Group();
  const int64_t sequences = attention.batch * attention.kv_heads;
  int64_t pairs = 0;
  for (int64_t b = 0; b < attention.batch; ++b)
    pairs += (attention.length[b] + attention.new_rows) * attention.rows * attention.heads;
  const bool spread = threads > 1 && pairs * attention.width >= kSpreadProducts;
  int64_t bands = (rows + kBand - 1) / kBand;
  while (spread && sequences * bands < 2 * threads && rows / bands > kRows) ++bands;
  const auto work = [&](int64_t part) {
    thread_local Scratch scratch;
    const int64_t sequence = part / bands, band = part % bands;
    const int64_t begin = rows * band / bands, end = rows * (band + 1) / bands;
    Band<Key>(attention, scratch, sequence / attention.kv_heads, sequence % attention.kv_heads,
              begin, end - begin)
        .Run();
  };
  if (spread) return Spread(pool, sequences * bands, work);
  for (int64_t part = 0; part < sequences * bands; ++part) work(part);
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer keys,
                  ffi::AnyBuffer values, ffi::AnyBuffer key_pages, ffi::AnyBuffer value_pages,
                  ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> length,
                  ffi::Buffer<ffi::S32> first, ffi::Buffer<ffi::PRED> visible,
                  ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::F32> out, bool paged,
                  float scale) {
  const auto shape = queries.dimensions(), stored = key_pages.dimensions();
  const auto attend = [&](auto* pages) {
    using Key = std::remove_pointer_t<decltype(pages)>;
    const auto elements = [](ffi::AnyBuffer& buffer) {
      return static_cast<const Key*>(buffer.untyped_data());
    };
    Attend(pool, Attention<Key>{
        queries.typed_data(), elements(keys), elements(values), elements(key_pages),
        elements(value_pages), table.typed_data(), length.typed_data(), first.typed_data(),
        visible.typed_data(), sinks.typed_data(), out->typed_data(),
        /*batch=*/shape[0], /*rows=*/shape[1], /*heads=*/shape[2], /*width=*/shape[3],
        /*kv_heads=*/keys.dimensions()[2], /*new_rows=*/keys.dimensions()[1],
        /*pages=*/stored[1], /*page_size=*/stored[2], /*table_width=*/table.dimensions()[1],
        /*masks=*/visible.dimensions()[0], paged, /*has_sinks=*/sinks.dimensions()[0] > 0, scale});
    return ffi::Error::Success();
  };
  switch (key_pages.element_type()) {
    case ffi::F32: return attend(static_cast<float*>(nullptr));
    case ffi::BF16: return attend(static_cast<Bfloat16*>(nullptr));
    default: return ffi::Error::InvalidArgument("keys are not float32 or bfloat16");
  }
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashAttention, dflash::Handle,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("paged")
                                  .Attr<float>("scale"));
