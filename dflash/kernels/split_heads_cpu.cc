// Split of projected rows into normalized and rotated heads on a CPU, called through XLA's foreign
// function interface.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dflash {
namespace {

constexpr int64_t kSums = 16;  // partial sums of squares, added in a fixed order

// Factor of the RMS norm of a head.
float Factor(const float* head, int64_t width, float eps) {
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= width; i += kSums)
    for (int64_t j = 0; j < kSums; ++j) sums[j] += head[i + j] * head[i + j];
  for (; i < width; ++i) sums[i % kSums] += head[i] * head[i];
  float total = 0;
  for (const float sum : sums) total += sum;
  return 1 / std::sqrt(total / static_cast<float>(width) + eps);
}

// Heads of one part: `scale` [H] is that of the norm, or null; so are cos and sin [half].
struct Form {
  const float *scale, *cos, *sin;
  int64_t half;
};

void Convert(const float* head, float* out, int64_t width, const Form& form, float eps,
             float* normed) {
  if (form.scale != nullptr) {
    const float factor = Factor(head, width, eps);
    for (int64_t i = 0; i < width; ++i) normed[i] = form.scale[i] * (head[i] * factor);
    head = normed;
  }
  if (form.cos == nullptr) {
    std::memcpy(out, head, width * sizeof(float));
    return;
  }
  const int64_t half = form.half;
  for (int64_t i = 0; i < half; ++i) {
    const float left = head[i], right = head[half + i];
    out[i] = left * form.cos[i] - right * form.sin[i];
    out[half + i] = right * form.cos[i] + left * form.sin[i];
  }
  std::memcpy(out + 2 * half, head + 2 * half, (width - 2 * half) * sizeof(float));
}

// `forms` has two flags per part: whether its heads are normalized, and whether they are rotated.
ffi::Error Handle(ffi::Buffer<ffi::F32> rows, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Buffer<ffi::F32> scales, ffi::RemainingRets out, float eps,
                  ffi::Span<const int64_t> forms) {
  const int64_t columns = rows.dimensions().back();
  const int64_t count = rows.element_count() / columns;
  const int64_t half = cos.dimensions().back(), width = scales.dimensions().back();
  const float* scale = scales.typed_data();
  int64_t begin = 0;
  std::vector<float> normed(width);
  for (size_t part = 0; part < out.size(); ++part) {
    auto heads = out.get<ffi::Buffer<ffi::F32>>(part);
    if (heads.has_error()) return heads.error();
    const int64_t number = (*heads)->dimensions()[2];
    const bool is_normed = forms[2 * part], is_rotated = forms[2 * part + 1];
    for (int64_t row = 0; row < count; ++row) {
      const Form form{is_normed ? scale : nullptr,
                      is_rotated ? cos.typed_data() + row * half : nullptr,
                      sin.typed_data() + row * half, half};
      for (int64_t head = 0; head < number; ++head)
        Convert(rows.typed_data() + row * columns + begin + head * width,
                (*heads)->typed_data() + (row * number + head) * width, width, form, eps,
                normed.data());
    }
    begin += number * width;
    if (is_normed) scale += width;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashSplitHeads, dflash::Handle,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingRets()
                                  .Attr<float>("eps")
                                  .Attr<ffi::Span<const int64_t>>("forms"));
