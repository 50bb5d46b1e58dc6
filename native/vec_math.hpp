// Functions of sixteen numbers at a time. For kernels/*.cpp only, as vec.hpp.
#pragma once

#include "vec.hpp"

namespace phalanx::PHALANX_ISA {

// e to the x, off by about one unit in the last place: 2^n times a polynomial of the rest (the coefficients are those of
// Moshier's Cephes library). Infinity above 88.73, zero below -104, NaN stays NaN.
PHALANX_INLINE f32x16 exp(f32x16 x) {
  x = x > 89.0f ? splat(89.0f) : x;
  x = x < -110.0f ? splat(-110.0f) : x;
  const float shift = 12582912.0f;  // 1.5 · 2^23: adding it rounds to a whole number, which the lowest bits then hold
  const f32x16 moved = fma(x, splat(1.44269504088896341f), splat(shift));
  const f32x16 n = moved - shift;
  f32x16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  // In two steps, since 2^128 is not a float.
  const i32x16 whole = (i32x16)moved - 0x4b400000;
  const i32x16 half = whole >> 1;
  return p * (f32x16)((half + 127) << 23) * (f32x16)((whole - half + 127) << 23);
#endif
}

// The error function, off by 1.5e-7 (Abramowitz and Stegun, "Handbook of mathematical functions", 7.1.26).
PHALANX_INLINE f32x16 erf(f32x16 x) {
  const f32x16 size = (f32x16)((u32x16)x & 0x7fffffffu);
  const f32x16 t = 1.0f / fma(size, splat(0.3275911f), splat(1.0f));
  f32x16 p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const f32x16 y = 1.0f - p * t * exp(-size * size);
  return (f32x16)((u32x16)y | ((u32x16)x & 0x80000000u));
}

}  // namespace phalanx::PHALANX_ISA
