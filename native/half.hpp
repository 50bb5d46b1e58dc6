// float16 to and from float32, sixteen at a time. Included by kernels/*.cpp only.
#pragma once

#include "vec.hpp"

namespace phalanx::PHALANX_ISA {

struct f16 {
  std::uint16_t bits;
};

PHALANX_INLINE f32x16 from_f16(u16x16 x) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(__F16C__)
  union { u16x16 v; __m128i h[2]; } in{x};
  union { f32x16 v; __m256 h[2]; } out;
  out.h[0] = _mm256_cvtph_ps(in.h[0]);
  out.h[1] = _mm256_cvtph_ps(in.h[1]);
  return out.v;
#else
  const u32x16 bits = __builtin_convertvector(x, u32x16);
  const u32x16 sign = (bits & 0x8000u) << 16;
  const u32x16 number = (bits & 0x7fffu) << 13;
  const u32x16 special = (u32x16)((bits & 0x7c00u) == 0x7c00u) & (0xffu << 23);
  // Read as a float32 it is 2^112 times too small, denormals too.
  return (f32x16)((u32x16)((f32x16)number * 0x1p112f) | special | sign);
#endif
}

// To nearest, ties to even.
PHALANX_INLINE u16x16 to_f16(f32x16 x) {
#if defined(__AVX512F__)
  return (u16x16)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  union { f32x16 v; __m256 h[2]; } in{x};
  union { u16x16 v; __m128i h[2]; } out;
  out.h[0] = _mm256_cvtps_ph(in.h[0], _MM_FROUND_TO_NEAREST_INT);
  out.h[1] = _mm256_cvtps_ph(in.h[1], _MM_FROUND_TO_NEAREST_INT);
  return out.v;
#else
  const u32x16 bits = (u32x16)x, sign = (bits >> 16) & 0x8000u, number = bits & 0x7fffffffu;
  const u32x16 small = (u32x16)((f32x16)number + 0.5f) - 0x3f000000u;  // the unit of float32 at 0.5 is that of denormals
  const u32x16 normal = (number + (((number >> 13) & 1u) + 0xfffu) - (112u << 23)) >> 13;
  const u32x16 is_small = (u32x16)(number < (113u << 23)), is_large = (u32x16)(number >= 0x477ff000u);
  const u32x16 is_nan = (u32x16)(number > (0xffu << 23));
  u32x16 half = (small & is_small) | (normal & ~is_small);
  half = (0x7c00u & is_large) | (half & ~is_large);
  half |= (0x200u & is_nan);
  return __builtin_convertvector(half | sign, u16x16);
#endif
}

PHALANX_INLINE f32x16 load16(const f16* p) { return from_f16(load<u16x16>(p)); }
PHALANX_INLINE void store16(f16* p, f32x16 v) { store(p, to_f16(v)); }

}  // namespace phalanx::PHALANX_ISA
