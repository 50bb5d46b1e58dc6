// What the kernels of products with quantised weights share: how a block is unpacked, and what is done with its integers'
// products, in which order. Included by kernels/block_*.cpp only.
#pragma once

#include "ahead.hpp"
#include "block_matmul.hpp"
#include "half.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the intrinsics' own undefined operands
#endif

namespace phalanx::PHALANX_ISA {

// Outputs that are computed together, as many of a group as fill a register.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
using floats = float __attribute__((vector_size(4 * kWidth)));
using ints = std::int32_t __attribute__((vector_size(4 * kWidth)));
using quads = std::uint8_t __attribute__((vector_size(4 * kWidth)));  // four neighbouring inputs of each output
using pairs = std::uint16_t __attribute__((vector_size(4 * kWidth)));
using signed_pairs = std::int16_t __attribute__((vector_size(4 * kWidth)));
using halves = std::uint16_t __attribute__((vector_size(2 * kWidth)));
using bytes = std::uint8_t __attribute__((vector_size(kWidth)));
using signed_bytes = std::int8_t __attribute__((vector_size(kWidth)));

#define PHALANX_UNROLL _Pragma("GCC unroll 16")

#define PHALANX_EACH_KIND(DO) \
  DO(q4_0) DO(q4_1) DO(q5_0) DO(q5_1) DO(q8_0) DO(q4_k) DO(q5_k) DO(q6_k) DO(int8) DO(int4)

// Unsigned weights times signed activations are what VNNI multiplies. Where a set multiplies signed ones instead, eight
// bits are taken less 128, and the activations' sum need not be subtracted.
#if defined(__AVX512VNNI__) || !(defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD))
constexpr bool kSignedWeights = false;
#else
constexpr bool kSignedWeights = true;
#endif

PHALANX_INLINE floats to_float(ints v) { return __builtin_convertvector(v, floats); }
#if defined(__AVX512F__)
PHALANX_INLINE floats fused(floats a, floats b, floats c) { return fma(a, b, c); }
PHALANX_INLINE floats from_halves(halves x) { return from_f16(x); }
#elif defined(__AVX2__)
PHALANX_INLINE floats fused(floats a, floats b, floats c) {
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
PHALANX_INLINE floats from_halves(halves x) { return (floats)_mm256_cvtph_ps((__m128i)x); }
#else
PHALANX_INLINE floats fused(floats a, floats b, floats c) { return a * b + c; }
PHALANX_INLINE floats from_halves(halves x) {  // as from_f16
  using words = std::uint32_t __attribute__((vector_size(4 * kWidth)));
  words bits = {};
  for (int i = 0; i < kWidth; ++i) bits[i] = x[i];
  const words special = (words)((bits & 0x7c00u) == 0x7c00u) & (0xffu << 23);
  return (floats)((words)((floats)((bits & 0x7fffu) << 13) * 0x1p112f) | special | (bits & 0x8000u) << 16);
}
#endif

template <BlockKind kKind>
struct Kind {
  static constexpr BlockLayout layout = kBlockLayouts[static_cast<int>(kKind)];
  static constexpr int bits = layout.bits;
  static constexpr bool super = layout.super_bytes > 0;
  static constexpr bool own_zero = kKind == BlockKind::int4;  // with each scale
  static constexpr bool halves = kKind == BlockKind::q6_k;  // a scale for each 16 inputs
  static constexpr bool channel = layout.tail_bytes > 0;
  static constexpr bool minimum = layout.zero == 0;
  static constexpr int offset_factor = bits == 8 && kSignedWeights ? 0 : layout.zero / 8;

  // Registers j and 4 + j of a block's eight: inputs 4j … and 16 + 4j ….
  static PHALANX_INLINE void unpack(const std::uint8_t* block, int j, quads& low, quads& high) {
    if constexpr (bits == 8) {
      low = load<quads>(block + 64 * j);
      high = load<quads>(block + 64 * (4 + j));
    } else {
      const pairs both = load<pairs>(block + 64 * j);
      pairs first = both & 0x0f0f, second = (both >> 4) & 0x0f0f;
      if constexpr (bits == 5) {
        const pairs fifth = load<pairs>(block + 256);
        first |= (fifth << (4 - j)) & 0x1010;
        second |= (fifth >> j) & 0x1010;
      }
      if constexpr (bits == 6) {
        const pairs lower = load<pairs>(block + 256), upper = load<pairs>(block + 320);
        first |= (j < 2 ? lower << (4 - 2 * j) : lower >> (2 * j - 4)) & 0x3030;
        second |= (j < 2 ? upper << (4 - 2 * j) : upper >> (2 * j - 4)) & 0x3030;
      }
      low = (quads)first;
      high = (quads)second;
    }
  }
};

struct Scales {
  floats scale, second;  // `second` is the other half's scale, or the minimum
};

// Those of one block, for outputs `lane` and after of a group. Products of scales are exact: float16 (or bfloat16) times
// at most eight bits.
template <BlockKind kKind>
PHALANX_INLINE Scales scales_of(const std::uint8_t* group, const GroupShape& shape, std::size_t block, int lane) {
  using K = Kind<kKind>;
  const std::uint8_t* at = group + shape.scales + block * K::layout.scale_bytes;
  Scales found{};
  if constexpr (K::own_zero) {
    const std::uint8_t* shared = group + shape.super(K::layout, block);
    found.scale = load<floats>(shared + 4 * lane);
    found.second = -(found.scale * __builtin_convertvector(load<bytes>(shared + 64 + lane), floats));
  } else if constexpr (K::super) {
    const std::uint8_t* factors = group + shape.super(K::layout, block) + 2 * lane;
    const floats factor = from_halves(load<halves>(factors));
    at += lane;
    if constexpr (K::halves) {
      found.scale = factor * __builtin_convertvector(load<signed_bytes>(at), floats);
      found.second = factor * __builtin_convertvector(load<signed_bytes>(at + 16), floats);
    } else {
      found.scale = factor * __builtin_convertvector(load<bytes>(at), floats);
      const floats minimum = from_halves(load<halves>(factors + 32));
      found.second = -(minimum * __builtin_convertvector(load<bytes>(at + 16), floats));
    }
  } else if constexpr (!K::channel) {
    found.scale = from_halves(load<halves>(at + 2 * lane));
    if constexpr (K::minimum) found.second = from_halves(load<halves>(at + 32 + 2 * lane));
  }
  return found;
}

template <typename T>
PHALANX_INLINE floats bias_of(const BlockProduct& product, std::size_t column, int count) {
  float lanes[16];
  store(lanes, load_some(static_cast<const T*>(product.bias) + column, count));
  return load<floats>(lanes);
}

template <typename T>
PHALANX_INLINE void put(const BlockProduct& product, std::size_t column, int count, std::size_t row, floats total) {
  T* y = static_cast<T*>(product.y) + row * product.stride + column;
  float lanes[16] = {};
  store(lanes, total);
  if (count == 16)
    store16(y, load16(lanes));
  else
    store_some(y, load16(lanes), count);
}

struct Dots {
  ints dot, second;  // `second` is of the other half, where it has a scale of its own
};

// What the weights' zeros take from a row's products with a block: `offset` are its two sums.
template <BlockKind kKind>
PHALANX_INLINE Dots less_zeros(const std::int32_t* offset) {
  using K = Kind<kKind>;
  Dots begin{};
  if constexpr (K::offset_factor != 0) {
    begin.dot += (K::halves ? offset[0] : offset[0] + offset[1]) * K::offset_factor;
    if constexpr (K::halves) begin.second += offset[1] * K::offset_factor;
  }
  return begin;
}

// A row's products with a block, added to those with the blocks before it.
template <BlockKind kKind>
PHALANX_INLINE floats add_block(floats sum, const Dots& dots, const Scales& scales, float scale, float scaled_sum) {
  using K = Kind<kKind>;
  const floats factor = floats{} + scale, dot = to_float(dots.dot);
  sum = fused(K::channel ? dot : dot * scales.scale, factor, sum);
  if constexpr (K::halves) sum = fused(to_float(dots.second) * scales.second, factor, sum);
  if constexpr (K::minimum) sum = fused(scales.second, floats{} + scaled_sum, sum);
  return sum;
}

// The sums of kRows rows and of outputs `lane` and after of a group, as they are in the result.
template <BlockKind kKind, int kRows>
PHALANX_INLINE void finish(const BlockProduct& product, const BlockPart& part, const GroupShape& shape,
                           std::size_t group, std::size_t row, int lane, const floats (&total)[kRows]) {
  const std::int64_t first = group * kLanes + lane;
  if (first >= part.outputs) return;
  const int count = part.outputs - first < kWidth ? static_cast<int>(part.outputs - first) : kWidth;
  floats bias = {};
  if (product.bias != nullptr) {
    switch (product.bias_type) {
      case Number::f32: bias = bias_of<float>(product, part.column + first, count); break;
      case Number::bf16: bias = bias_of<bf16>(product, part.column + first, count); break;
      case Number::f16: bias = bias_of<f16>(product, part.column + first, count); break;
    }
  }
  const std::uint8_t* packed = reinterpret_cast<const std::uint8_t*>(part.packed) + group * shape.bytes;
  PHALANX_UNROLL
  for (int r = 0; r < kRows; ++r) {
    floats sum = total[r];
    if constexpr (Kind<kKind>::channel) sum *= load<floats>(packed + shape.tail + 4 * lane);
    sum += bias;
    switch (product.type) {
      case Number::f32: put<float>(product, part.column + first, count, row + r, sum); break;
      case Number::bf16: put<bf16>(product, part.column + first, count, row + r, sum); break;
      case Number::f16: put<f16>(product, part.column + first, count, row + r, sum); break;
    }
  }
}

}  // namespace phalanx::PHALANX_ISA
