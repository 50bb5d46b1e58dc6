#include "pointwise.hpp"

#include "vec.hpp"

namespace phalanx::PHALANX_ISA {
namespace {

template <typename T>
void rms_norm(T* x, const T* delta, const T* weight, T* y, int width, float eps) {
  f32x16 squares = {};
  for (int i = 0; i < width; i += 16) {
    const int count = width - i < 16 ? width - i : 16;
    f32x16 v = count == 16 ? load16(x + i) : load_some(x + i, count);
    if (delta != nullptr) {
      v += count == 16 ? load16(delta + i) : load_some(delta + i, count);
      store_some(x + i, v, count);
      v = load_some(x + i, count);  // as it was rounded
    }
    squares = fma(v, v, squares);
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps);
  for (int i = 0; i < width; i += 16) {
    const int count = width - i < 16 ? width - i : 16;
    f32x16 v = load_some(x + i, count) * factor;
    if (weight != nullptr) v *= load_some(weight + i, count);
    store_some(y + i, v, count);
  }
}

}  // namespace

const Pointwise pointwise = {rms_norm<float>, rms_norm<bf16>};

}  // namespace phalanx::PHALANX_ISA
