#include "block_matmul.hpp"

#include "half.hpp"

namespace phalanx::PHALANX_ISA {
namespace {

using u8x64 = std::uint8_t __attribute__((vector_size(64)));
using u8x16 = std::uint8_t __attribute__((vector_size(16)));
using s8x16 = std::int8_t __attribute__((vector_size(16)));
using i16x32 = std::int16_t __attribute__((vector_size(64)));

#define PHALANX_UNROLL _Pragma("GCC unroll 8")

PHALANX_INLINE std::int32_t four(const std::int8_t* q) {
  std::int32_t v;
  std::memcpy(&v, q, sizeof v);
  return v;
}

// Unsigned weights times signed activations are what VNNI multiplies. Where a set multiplies signed ones instead, eight
// bits are taken less 128, and the activations' sum need not be subtracted.
#if defined(__AVX512VNNI__) || !(defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD))
constexpr bool kSignedWeights = false;
#else
constexpr bool kSignedWeights = true;
#endif

// Each lane: its four weights times the four activations, added to `sum`. All exact.
template <int kBits>
PHALANX_INLINE i32x16 dot4(i32x16 sum, u8x64 weights, std::int32_t activations) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(activations));
#elif defined(__AVX2__)
  union { u8x64 v; __m256i h[2]; } w{weights};
  union { i32x16 v; __m256i h[2]; } s{sum};
  const __m256i a = _mm256_set1_epi32(activations), ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; ++i) {
    __m256i pairs;  // two products fit 16 bits: 63 · 127 · 2, or 128 · 127 · 2
    if constexpr (kBits == 8) {
      const __m256i number = _mm256_xor_si256(w.h[i], _mm256_set1_epi8(-128));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(a, number));
    } else {
      pairs = _mm256_maddubs_epi16(w.h[i], a);
    }
    s.h[i] = _mm256_add_epi32(s.h[i], _mm256_madd_epi16(pairs, ones));
  }
  return s.v;
#elif defined(__ARM_FEATURE_DOTPROD)
  union { u8x64 v; int8x16_t q[4]; } w{kBits == 8 ? weights ^ 0x80 : weights};
  union { i32x16 v; int32x4_t q[4]; } s{sum};
  const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(activations));
  for (int i = 0; i < 4; ++i) s.q[i] = vdotq_s32(s.q[i], w.q[i], a);
  return s.v;
#else
  const u16x32 pairs = (u16x32)weights;
  const std::int16_t a0 = (std::int8_t)activations, a1 = (std::int8_t)(activations >> 8),
                     a2 = (std::int8_t)(activations >> 16), a3 = (std::int8_t)(activations >> 24);
  const i16x32 even = (i16x32)(i32x16{} + ((std::uint16_t)a0 | (std::int32_t)((std::uint32_t)(std::uint16_t)a2 << 16)));
  const i16x32 odd = (i16x32)(i32x16{} + ((std::uint16_t)a1 | (std::int32_t)((std::uint32_t)(std::uint16_t)a3 << 16)));
  const i32x16 first = (i32x16)((i16x32)(pairs & 0xff) * even), second = (i32x16)((i16x32)(pairs >> 8) * odd);
  return sum + ((first << 16) >> 16) + (first >> 16) + ((second << 16) >> 16) + (second >> 16);
#endif
}

PHALANX_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

template <BlockKind kKind>
struct Kind {
  static constexpr BlockLayout layout = kBlockLayouts[static_cast<int>(kKind)];
  static constexpr int bits = layout.bits;
  static constexpr bool super = layout.super_bytes > 0;
  static constexpr bool halves = kKind == BlockKind::q6_k;  // a scale for each 16 inputs
  static constexpr bool channel = layout.tail_bytes > 0;
  static constexpr bool minimum = layout.zero == 0;
  static constexpr int offset_factor = bits == 8 && kSignedWeights ? 0 : layout.zero / 8;

  // Registers j and 4 + j of a block's eight: inputs 4j … and 16 + 4j ….
  static PHALANX_INLINE void unpack(const std::uint8_t* block, int j, u8x64& low, u8x64& high) {
    if constexpr (bits == 8) {
      low = load<u8x64>(block + 64 * j);
      high = load<u8x64>(block + 64 * (4 + j));
      return;
    } else {
      const u16x32 both = load<u16x32>(block + 64 * j);
      u16x32 first = both & 0x0f0f, second = (both >> 4) & 0x0f0f;
      if constexpr (bits == 5) {
        const u16x32 fifth = load<u16x32>(block + 256);
        first |= (fifth << (4 - j)) & 0x1010;
        second |= (fifth >> j) & 0x1010;
      }
      if constexpr (bits == 6) {
        const u16x32 lower = load<u16x32>(block + 256), upper = load<u16x32>(block + 320);
        first |= (j < 2 ? lower << (4 - 2 * j) : lower >> (2 * j - 4)) & 0x3030;
        second |= (j < 2 ? upper << (4 - 2 * j) : upper >> (2 * j - 4)) & 0x3030;
      }
      low = (u8x64)first;
      high = (u8x64)second;
    }
  }
};

struct Scales {
  f32x16 scale, second;  // `second` is the other half's scale, or the minimum
};

// Those of one block. Products of scales are exact: float16 times at most eight bits.
template <BlockKind kKind>
PHALANX_INLINE Scales scales_of(const std::uint8_t* group, const GroupShape& shape, std::size_t block,
                                std::size_t phase) {
  using K = Kind<kKind>;
  const std::uint8_t* at = group + shape.scales + block * K::layout.scale_bytes;
  Scales found{};
  if constexpr (K::super) {
    const std::uint8_t* factors = group + shape.supers + (block + phase) / 8 * K::layout.super_bytes;
    const f32x16 factor = from_f16(load<u16x16>(factors));
    if constexpr (K::halves) {
      found.scale = factor * __builtin_convertvector(load<s8x16>(at), f32x16);
      found.second = factor * __builtin_convertvector(load<s8x16>(at + 16), f32x16);
    } else {
      found.scale = factor * __builtin_convertvector(load<u8x16>(at), f32x16);
      found.second = -(from_f16(load<u16x16>(factors + 32)) * __builtin_convertvector(load<u8x16>(at + 16), f32x16));
    }
  } else if constexpr (!K::channel) {
    found.scale = from_f16(load<u16x16>(at));
    if constexpr (K::minimum) found.second = from_f16(load<u16x16>(at + 32));
  }
  return found;
}

template <typename T>
PHALANX_INLINE f32x16 bias_of(const BlockProduct& product, std::size_t column, int count) {
  return load_some(static_cast<const T*>(product.bias) + column, count);
}

template <typename T>
PHALANX_INLINE void put(const BlockProduct& product, std::size_t column, int count, std::size_t row, f32x16 total) {
  T* y = static_cast<T*>(product.y) + row * product.stride + column;
  if (count == kLanes)
    store16(y, total);
  else
    store_some(y, total, count);
}

// kRows rows times kGroups groups. What is added to a result, and in which order, is the same for every kRows and
// kGroups: block by block, the block's integers exactly.
template <BlockKind kKind, int kRows, int kGroups>
void tile(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
          std::size_t row) {
  using K = Kind<kKind>;
  const std::size_t blocks = product.rows.blocks;
  const std::uint8_t* packed = reinterpret_cast<const std::uint8_t*>(part.packed) + group * shape.bytes;
  const std::int8_t* q = product.rows.q + row * blocks * kBlock;
  const float* scale = product.rows.scale + row * blocks;
  const float* scaled_sum = product.rows.scaled_sum + row * blocks;
  const std::int32_t* offset = product.rows.offset + row * blocks * 2;
  f32x16 total[kGroups][kRows] = {};
  for (std::size_t b = 0; b < blocks; ++b) {
    i32x16 dots[kGroups][kRows], others[kGroups][kRows];
    PHALANX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      i32x16 begin = {}, begin_other = {};
      if constexpr (K::offset_factor != 0) {
        const std::int32_t first = offset[r * blocks * 2 + 2 * b], second = offset[r * blocks * 2 + 2 * b + 1];
        begin += (K::halves ? first : first + second) * K::offset_factor;
        if constexpr (K::halves) begin_other += second * K::offset_factor;
      }
      PHALANX_UNROLL
      for (int c = 0; c < kGroups; ++c) {
        dots[c][r] = begin;
        others[c][r] = begin_other;
      }
    }
    PHALANX_UNROLL
    for (int j = 0; j < 4; ++j) {
      u8x64 low[kGroups], high[kGroups];
      PHALANX_UNROLL
      for (int c = 0; c < kGroups; ++c) {
        const std::uint8_t* block = packed + c * shape.bytes + b * 64 * K::bits;
        if constexpr (kRows == 1) __builtin_prefetch(block + 2048 + 64 * j);
        K::unpack(block, j, low[c], high[c]);
      }
      PHALANX_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const std::int8_t* a = q + (r * blocks + b) * kBlock + 4 * j;
        const std::int32_t first = four(a), second = four(a + 16);
        PHALANX_UNROLL
        for (int c = 0; c < kGroups; ++c) {
          dots[c][r] = dot4<K::bits>(dots[c][r], low[c], first);
          if constexpr (K::halves || kRows == 1)
            others[c][r] = dot4<K::bits>(others[c][r], high[c], second);
          else
            dots[c][r] = dot4<K::bits>(dots[c][r], high[c], second);
        }
      }
    }
    PHALANX_UNROLL
    for (int c = 0; c < kGroups; ++c) {
      const Scales scales = scales_of<kKind>(packed + c * shape.bytes, shape, b, part.phase);
      PHALANX_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const f32x16 factor = splat(scale[r * blocks + b]);
        f32x16& sum = total[c][r];
        if constexpr (K::halves) {
          sum = fma(to_float(dots[c][r]) * scales.scale, factor, sum);
          sum = fma(to_float(others[c][r]) * scales.second, factor, sum);
        } else {
          const f32x16 dot = to_float(kRows == 1 ? dots[c][r] + others[c][r] : dots[c][r]);
          sum = fma(K::channel ? dot : dot * scales.scale, factor, sum);
          if constexpr (K::minimum) sum = fma(scales.second, splat(scaled_sum[r * blocks + b]), sum);
        }
      }
    }
  }
  PHALANX_UNROLL
  for (int c = 0; c < kGroups; ++c) {
    const std::size_t first = (group + c) * kLanes;
    const int count = part.outputs - first < kLanes ? static_cast<int>(part.outputs - first) : kLanes;
    f32x16 bias = {};
    if (product.bias != nullptr) {
      switch (product.bias_type) {
        case Number::f32: bias = bias_of<float>(product, part.column + first, count); break;
        case Number::bf16: bias = bias_of<bf16>(product, part.column + first, count); break;
        case Number::f16: bias = bias_of<f16>(product, part.column + first, count); break;
      }
    }
    PHALANX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      f32x16 sum = total[c][r];
      if constexpr (K::channel) sum *= load<f32x16>(packed + c * shape.bytes + shape.tail);
      sum += bias;
      switch (product.type) {
        case Number::f32: put<float>(product, part.column + first, count, row + r, sum); break;
        case Number::bf16: put<bf16>(product, part.column + first, count, row + r, sum); break;
        case Number::f16: put<f16>(product, part.column + first, count, row + r, sum); break;
      }
    }
  }
}

#if defined(__AVX512F__)
constexpr int kWide = 8;
#else
constexpr int kWide = 2;
#endif

template <BlockKind kKind>
void multiply_kind(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
                   std::size_t row_begin, std::size_t row_end) {
  const GroupShape shape(Kind<kKind>::layout, product.rows.blocks, part.phase);
  for (std::size_t group = group_begin; group < group_end;) {
    if (row_end - row_begin == 1 && group_end - group >= 2) {
      tile<kKind, 1, 2>(product, part, shape, group, row_begin);
      group += 2;
      continue;
    }
    std::size_t row = row_begin;
    for (; row_end - row >= kWide; row += kWide) tile<kKind, kWide, 1>(product, part, shape, group, row);
    if constexpr (kWide > 4)
      if (row_end - row >= 4) tile<kKind, 4, 1>(product, part, shape, group, row), row += 4;
    if constexpr (kWide > 2)
      if (row_end - row >= 2) tile<kKind, 2, 1>(product, part, shape, group, row), row += 2;
    if (row_end > row) tile<kKind, 1, 1>(product, part, shape, group, row);
    ++group;
  }
}

void multiply(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
              std::size_t row_begin, std::size_t row_end) {
  switch (static_cast<BlockKind>(part.kind)) {
#define PHALANX_CASE(kind) \
  case BlockKind::kind: multiply_kind<BlockKind::kind>(product, part, group_begin, group_end, row_begin, row_end); break;
    PHALANX_CASE(q4_0)
    PHALANX_CASE(q4_1)
    PHALANX_CASE(q5_0)
    PHALANX_CASE(q5_1)
    PHALANX_CASE(q8_0)
    PHALANX_CASE(q4_k)
    PHALANX_CASE(q5_k)
    PHALANX_CASE(q6_k)
    PHALANX_CASE(int8)
#undef PHALANX_CASE
    default: break;
  }
}

// The larger of two by magnitude is chosen by comparison, which drops a NaN; it comes back through x · 0.
template <typename T>
void quantize_row(const T* x, std::size_t columns, std::size_t lead, std::size_t blocks, std::int8_t* q, float* scale,
                  float* scaled_sum, std::int32_t* offset) {
  for (std::size_t b = 0; b < blocks; ++b) {
    alignas(64) T held[kBlock];
    const T* from = held;
    if (b * kBlock < lead || b * kBlock + kBlock > lead + columns) {
      std::memset(held, 0, sizeof held);
      const std::size_t begin = b * kBlock < lead ? lead - b * kBlock : 0;
      std::size_t end = lead + columns - b * kBlock;
      if (end > kBlock) end = kBlock;
      if (begin < end) std::memcpy(held + begin, x + (b * kBlock + begin - lead), (end - begin) * sizeof(T));
    } else {
      from = x + (b * kBlock - lead);
    }
    const f32x16 first = load16(from), second = load16(from + 16);
    const f32x16 poison = first * 0.0f + second * 0.0f;
    const f32x16 a = (f32x16)((u32x16)first & 0x7fffffffu), c = (f32x16)((u32x16)second & 0x7fffffffu);
    float lane[16];
    store(lane, a > c ? a : c);
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    const float most = lane[0], wrong = sum(poison);
    const bool finite = wrong == 0.0f, tiny = !(most >= 1e-30f);
    const float factor = finite && !tiny ? 127.0f / most : 0.0f;
    const float unit = finite ? (tiny ? 0.0f : most / 127.0f) : wrong;
    // Adding 1.5 · 2^23 rounds to an integer, to even at a tie, and leaves it in the low bits.
    const f32x16 magic = splat(12582912.0f);
    i32x16 low = {}, high = {};
    if (factor != 0.0f) {
      low = (i32x16)(first * factor + magic) - 0x4b400000;
      high = (i32x16)(second * factor + magic) - 0x4b400000;
    }
    store(q + b * kBlock, __builtin_convertvector(low, s8x16));
    store(q + b * kBlock + 16, __builtin_convertvector(high, s8x16));
    std::int32_t sums[2] = {};
    std::int32_t lanes[16];
    store(lanes, low);
    for (int i = 0; i < 16; ++i) sums[0] += lanes[i];
    store(lanes, high);
    for (int i = 0; i < 16; ++i) sums[1] += lanes[i];
    scale[b] = unit;
    scaled_sum[b] = unit * static_cast<float>(sums[0] + sums[1]);
    offset[2 * b] = -8 * sums[0];
    offset[2 * b + 1] = -8 * sums[1];
  }
}

void quantize(const void* x, Number type, std::size_t columns, std::size_t lead, std::size_t blocks, std::int8_t* q,
              float* scale, float* scaled_sum, std::int32_t* offset) {
  switch (type) {
    case Number::f32:
      return quantize_row(static_cast<const float*>(x), columns, lead, blocks, q, scale, scaled_sum, offset);
    case Number::bf16:
      return quantize_row(static_cast<const bf16*>(x), columns, lead, blocks, q, scale, scaled_sum, offset);
    case Number::f16:
      return quantize_row(static_cast<const f16*>(x), columns, lead, blocks, q, scale, scaled_sum, offset);
  }
}

}  // namespace

const BlockMatmul block_matmul = {quantize, multiply};

}  // namespace phalanx::PHALANX_ISA
