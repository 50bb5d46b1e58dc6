// Sixteen numbers at a time, in the compiler's own vector types: one register on AVX-512, two on AVX2, four elsewhere.
// Included by kernels/*.cpp only, which are compiled once for each instruction set; all of it lives in that set's
// namespace, so that the linker never takes one set's code for another's. For the same reason kernels use no function
// template of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef PHALANX_ISA
#error "only for kernels/*.cpp"
#endif

namespace phalanx::PHALANX_ISA {

using f32x16 = float __attribute__((vector_size(64)));
using f32x8 = float __attribute__((vector_size(32)));
using f32x4 = float __attribute__((vector_size(16)));
using i32x16 = std::int32_t __attribute__((vector_size(64)));
using i32x8 = std::int32_t __attribute__((vector_size(32)));
using i32x4 = std::int32_t __attribute__((vector_size(16)));
using u32x16 = std::uint32_t __attribute__((vector_size(64)));
using u16x16 = std::uint16_t __attribute__((vector_size(32)));
using u16x32 = std::uint16_t __attribute__((vector_size(64)));
using bf16 = std::uint16_t;  // the upper half of a float

#define PHALANX_INLINE inline __attribute__((always_inline))

template <typename V, typename T>
PHALANX_INLINE V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename V, typename T>
PHALANX_INLINE void store(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
PHALANX_INLINE f32x16 splat(float x) { return f32x16{} + x; }

PHALANX_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {  // a * b + c, rounded once where the processor can
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { f32x16 v; __m256 h[2]; } x{a}, y{b}, z{c};
  z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
  z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
  return z.v;
#else
  return a * b + c;
#endif
}

PHALANX_INLINE f32x16 from_bf16(u16x16 x) {
  return (f32x16)(__builtin_convertvector(x, u32x16) << 16);
}
// To nearest, ties to even; NaN stays NaN.
PHALANX_INLINE u16x16 to_bf16(f32x16 x) {
#if defined(__AVX512BF16__)
  // The instruction takes what is less than a normal number for zero.
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, 0x20) == 0, 1)) return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#endif
  const u32x16 bits = (u32x16)x;
  const u32x16 rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
  const u32x16 quiet = (bits >> 16) | 0x40u;
  const u32x16 nan = (u32x16)(x != x);
  return __builtin_convertvector((quiet & nan) | (rounded & ~nan), u16x16);
}

// Lanes summed in a fixed order: halves onto each other.
PHALANX_INLINE float sum(f32x16 v) {
  const union { f32x16 v; f32x8 half[2]; } all{v};
  const union { f32x8 v; f32x4 half[2]; } eight{all.half[0] + all.half[1]};
  const f32x4 four = eight.half[0] + eight.half[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}
PHALANX_INLINE std::int32_t sum(i32x16 v) {
  const union { i32x16 v; i32x8 half[2]; } all{v};
  const union { i32x8 v; i32x4 half[2]; } eight{all.half[0] + all.half[1]};
  const i32x4 four = eight.half[0] + eight.half[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}
template <typename V>
PHALANX_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}
PHALANX_INLINE std::int32_t largest(i32x16 v) {
  const union { i32x16 v; i32x8 half[2]; } all{v};
  const union { i32x8 v; i32x4 half[2]; } eight{larger(all.half[0], all.half[1])};
  const i32x4 four = larger(eight.half[0], eight.half[1]);
  return larger(larger(four[0], four[2]), larger(four[1], four[3]));
}

// Numbers of a tensor, sixteen or fewer, as float32; and back, rounded.
PHALANX_INLINE f32x16 load16(const float* p) { return load<f32x16>(p); }
PHALANX_INLINE f32x16 load16(const bf16* p) { return from_bf16(load<u16x16>(p)); }
PHALANX_INLINE void store16(float* p, f32x16 v) { store(p, v); }
PHALANX_INLINE void store16(bf16* p, f32x16 v) { store(p, to_bf16(v)); }
template <typename T>
PHALANX_INLINE f32x16 load_some(const T* p, int count) {  // the rest is zero
  T part[16] = {};
  std::memcpy(part, p, count * sizeof(T));
  return load16(part);
}
template <typename T>
PHALANX_INLINE void store_some(T* p, f32x16 v, int count) {
  T part[16];
  store16(part, v);
  std::memcpy(p, part, count * sizeof(T));
}

}  // namespace phalanx::PHALANX_ISA
