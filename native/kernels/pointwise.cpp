#include "pointwise.hpp"

#include "vec.hpp"
#include "vec_math.hpp"

namespace phalanx::PHALANX_ISA {
namespace {

// f(i, count) for every sixteen numbers, and for what is left at the end.
template <typename F>
PHALANX_INLINE void each16(int width, F f) {
  int i = 0;
  for (; i + 16 <= width; i += 16) f(i, 16);
  if (i < width) f(i, width - i);
}
template <typename T>
PHALANX_INLINE f32x16 get(const T* p, int count) {
  return count == 16 ? load16(p) : load_some(p, count);
}
PHALANX_INLINE f32x16 put(float* p, f32x16 v, int count) {
  if (count == 16)
    store16(p, v);
  else
    store_some(p, v, count);
  return v;
}
PHALANX_INLINE f32x16 put(bf16* p, f32x16 v, int count) {
  const u16x16 rounded = to_bf16(v);
  std::memcpy(p, &rounded, count * sizeof *p);
  return from_bf16(rounded);
}

// The sum of f(i, count) over a row. Four sums side by side: each addition waits for the one before it in its own.
template <typename F>
PHALANX_INLINE float sum16(int width, F f) {
  f32x16 totals[4] = {};
  int i = 0;
  for (; i + 64 <= width; i += 64)
    for (int k = 0; k < 4; ++k) f(totals[k], i + 16 * k, 16);
  for (; i + 16 <= width; i += 16) f(totals[0], i, 16);
  if (i < width) f(totals[0], i, width - i);
  return sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

template <bool Layer, typename T, typename W>
void norm(void* x_, const void* delta_, const void* weight_, const void* bias_, void* y_, int width, float eps) {
  T *x = static_cast<T*>(x_), *y = static_cast<T*>(y_);
  const T* delta = static_cast<const T*>(delta_);
  const W *weight = static_cast<const W*>(weight_), *bias = static_cast<const W*>(bias_);
  const auto add = [](f32x16& total, f32x16 v) { total = Layer ? total + v : fma(v, v, total); };
  const float first = delta == nullptr ? sum16(width, [&](f32x16& total, int i, int count) { add(total, get(x + i, count)); })
                                       : sum16(width, [&](f32x16& total, int i, int count) {
                                           add(total, put(x + i, get(x + i, count) + get(delta + i, count), count));
                                         });
  float mean = 0, variance = first / static_cast<float>(width);
  if (Layer) {
    mean = variance;
    variance = sum16(width, [&](f32x16& total, int i, int count) {
                 f32x16 v = get(x + i, count) - mean;
                 if (count < 16) v = load_some((const float*)&v, count);
                 total = fma(v, v, total);
               }) / static_cast<float>(width);
  }
  const float factor = 1.0f / __builtin_sqrtf(variance + eps);
  each16(width, [&](int i, int count) {
    f32x16 v = get(x + i, count);
    v = (Layer ? v - mean : v) * factor;
    if (weight != nullptr) v *= get(weight + i, count);
    if (bias != nullptr) v += get(bias + i, count);
    put(y + i, v, count);
  });
}

struct Silu {
  static PHALANX_INLINE f32x16 of(f32x16 x) { return x / (1.0f + exp(-x)); }
};
struct Gelu {
  static PHALANX_INLINE f32x16 of(f32x16 x) { return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)); }
};
struct GeluTanh {  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
  static PHALANX_INLINE f32x16 of(f32x16 x) {
    const f32x16 u = x * fma(x * x, splat(0.044715f * 0.79788456080286536f), splat(0.79788456080286536f));
    return x / (1.0f + exp(-2.0f * u));
  }
};
struct Relu {
  static PHALANX_INLINE f32x16 of(f32x16 x) { return x < 0.0f ? f32x16{} : x; }
};

template <typename Function, typename T>
void activate(const void* x_, const void* factor_, void* y_, std::size_t count) {
  const T *x = static_cast<const T*>(x_), *factor = static_cast<const T*>(factor_);
  T* y = static_cast<T*>(y_);
  each16(static_cast<int>(count), [&](int i, int n) {
    f32x16 v = Function::of(get(x + i, n));
    if (factor != nullptr) v *= get(factor + i, n);
    put(y + i, v, n);
  });
}

// The angle is a float32 product, as the models were trained; the rest is in float64, so that what is stored is the
// right number but for its last rounding. The angle is less than 2^20 (the multiples of pi / 2 are then exact in parts
// of 33 bits, as in FDLIBM, whose polynomials these are).
template <typename T>
void turn(float position, const float* inverse, float factor, void* cos_, void* sin_, int half) {
  T *cos = static_cast<T*>(cos_), *sin = static_cast<T*>(sin_);
  constexpr int kLanes = 16;
  for (int from = 0; from < half; from += kLanes) {
    const int count = half - from < kLanes ? half - from : kLanes;
    float c[kLanes], s[kLanes], angle[kLanes] = {};
    for (int i = 0; i < count; ++i) angle[i] = position * inverse[from + i];
    for (int i = 0; i < kLanes; ++i) {
      const double x = angle[i];
      const double moved = x * 0.63661977236758134308 + 6755399441055744.0;  // 1.5 · 2^52
      std::int64_t quarter;
      std::memcpy(&quarter, &moved, sizeof moved);
      const double n = moved - 6755399441055744.0;
      const double r = ((x - n * 1.57079632673412561417e+00) - n * 6.07710050630396597660e-11) -
                       n * 2.02226624879595063154e-21;
      const double z = r * r;
      const double sine =
          r + r * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 +
              z * (-1.98412698298579493134e-04 + z * (2.75573137070700676789e-06 +
              z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
      const double cosine =
          1.0 - 0.5 * z + z * z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 +
              z * (2.48015872894767294178e-05 + z * (-2.75573143513906633035e-07 +
              z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
      const double a = quarter & 1 ? cosine : sine, b = quarter & 1 ? sine : cosine;
      s[i] = static_cast<float>(quarter & 2 ? -a : a);
      c[i] = static_cast<float>((quarter + 1) & 2 ? -b : b);
    }
    const f32x16 scaled_cos = load<f32x16>(c) * factor, scaled_sin = load<f32x16>(s) * factor;
    put(cos + from, scaled_cos, count);
    put(cos + half + from, scaled_cos, count);
    put(sin + from, -scaled_sin, count);
    put(sin + half + from, scaled_sin, count);
  }
}

template <typename T>
void add_up(const std::uintptr_t* pieces, int pieces_count, std::size_t from, void* y_, std::size_t numbers) {
  T* y = static_cast<T*>(y_);
  const auto piece = [&](int p) { return reinterpret_cast<const T*>(pieces[p]) + from; };
  each16(static_cast<int>(numbers), [&](int i, int count) {
    f32x16 total = get(piece(0) + i, count);
    for (int p = 1; p < pieces_count; ++p) total += get(piece(p) + i, count);
    put(y + i, total, count);
  });
}

}  // namespace

const Pointwise pointwise = {
    {{norm<false, float, float>, norm<false, bf16, bf16>, norm<false, bf16, float>},
     {norm<true, float, float>, norm<true, bf16, bf16>, norm<true, bf16, float>}},
    {{activate<Silu, float>, activate<Silu, bf16>},
     {activate<Gelu, float>, activate<Gelu, bf16>},
     {activate<GeluTanh, float>, activate<GeluTanh, bf16>},
     {activate<Relu, float>, activate<Relu, bf16>}},
    {turn<float>, turn<bf16>},
    {add_up<float>, add_up<bf16>},
};

}  // namespace phalanx::PHALANX_ISA
