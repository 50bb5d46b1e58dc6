#include "block_matmul.hpp"

#include "half.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the intrinsics' own undefined operands
#endif

namespace phalanx::PHALANX_ISA {
namespace {

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
using s8x16 = std::int8_t __attribute__((vector_size(16)));

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
PHALANX_INLINE ints dot4(ints sum, quads weights, std::int32_t activations) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(activations));
#elif defined(__AVX512BW__)  // as below
  const __m512i a = _mm512_set1_epi32(activations);
  __m512i two;
  if constexpr (kBits == 8) {
    const __m512i number = _mm512_xor_si512((__m512i)weights, _mm512_set1_epi8(-128));
    const __m512i turned = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(number), _mm512_setzero_si512(), a);
    two = _mm512_maddubs_epi16(_mm512_abs_epi8(number), turned);
  } else {
    two = _mm512_maddubs_epi16((__m512i)weights, a);
  }
  return sum + (ints)_mm512_madd_epi16(two, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i a = _mm256_set1_epi32(activations);
  __m256i two;  // two products fit 16 bits: 63 · 127 · 2, or 128 · 127 · 2
  if constexpr (kBits == 8) {
    const __m256i number = _mm256_xor_si256((__m256i)weights, _mm256_set1_epi8(-128));
    two = _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(a, number));
  } else {
    two = _mm256_maddubs_epi16((__m256i)weights, a);
  }
  return sum + (ints)_mm256_madd_epi16(two, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t number = (int8x16_t)(kBits == 8 ? weights ^ 0x80 : weights);
  return (ints)vdotq_s32((int32x4_t)sum, number, vreinterpretq_s8_s32(vdupq_n_s32(activations)));
#else
  const auto both = [](std::int32_t first, std::int32_t second) {
    return (signed_pairs)(ints{} + ((first & 0xffff) | (std::int32_t)((std::uint32_t)second << 16)));
  };
  const auto number = [&](int i) { return (std::int32_t)(std::int8_t)(activations >> (8 * i)); };
  const ints first = (ints)((signed_pairs)((pairs)weights & 0xff) * both(number(0), number(2)));
  const ints second = (ints)((signed_pairs)((pairs)weights >> 8) * both(number(1), number(3)));
  return sum + ((first << 16) >> 16) + (first >> 16) + ((second << 16) >> 16) + (second >> 16);
#endif
}

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

// kRows rows times the outputs from `lane` on of kGroups groups; what is `after` bytes further is fetched meanwhile. What is added to a result, and in which order, is the
// same for every kRows and kGroups: block by block, the block's integers exactly.
template <BlockKind kKind, int kRows, int kGroups>
void tile(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
          std::size_t row, int lane, std::size_t after) {
  using K = Kind<kKind>;
  constexpr bool kTwoSums = K::halves || kRows * kGroups <= 8;  // few sums would wait for each other
  const std::size_t blocks = product.rows.blocks;
  const std::uint8_t* packed = reinterpret_cast<const std::uint8_t*>(part.packed) + group * shape.bytes;
  const std::int8_t* q = product.rows.q + row * blocks * kBlock;
  const float* scale = product.rows.scale + row * blocks;
  const float* scaled_sum = product.rows.scaled_sum + row * blocks;
  const std::int32_t* offset = product.rows.offset + row * blocks * 2;
  floats total[kGroups][kRows] = {};
  for (std::size_t b = 0; b < blocks; ++b) {
    ints dots[kGroups][kRows], others[kGroups][kRows];
    PHALANX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ints begin = {}, begin_other = {};
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
      quads low[kGroups], high[kGroups];
      PHALANX_UNROLL
      for (int c = 0; c < kGroups; ++c) {
        const std::uint8_t* block = packed + c * shape.bytes + b * 64 * K::bits;
        __builtin_prefetch(block + after + 64 * j);
        if constexpr (K::bits == 8) __builtin_prefetch(block + after + 64 * (4 + j));
        K::unpack(block + 4 * lane, j, low[c], high[c]);
      }
      PHALANX_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const std::int8_t* a = q + (r * blocks + b) * kBlock + 4 * j;
        const std::int32_t first = four(a), second = four(a + 16);
        PHALANX_UNROLL
        for (int c = 0; c < kGroups; ++c) {
          dots[c][r] = dot4<K::bits>(dots[c][r], low[c], first);
          ints& sum = kTwoSums ? others[c][r] : dots[c][r];
          sum = dot4<K::bits>(sum, high[c], second);
        }
      }
    }
    PHALANX_UNROLL
    for (int c = 0; c < kGroups; ++c) {
      const std::uint8_t* own = packed + c * shape.bytes;
      if constexpr (K::layout.scale_bytes > 0) __builtin_prefetch(own + after + shape.scales + b * K::layout.scale_bytes);
      const Scales scales = scales_of<kKind>(own, shape, b, lane);
      PHALANX_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const floats factor = floats{} + scale[r * blocks + b];
        floats& sum = total[c][r];
        if constexpr (K::halves) {
          sum = fused(to_float(dots[c][r]) * scales.scale, factor, sum);
          sum = fused(to_float(others[c][r]) * scales.second, factor, sum);
        } else {
          const floats dot = to_float(kTwoSums ? dots[c][r] + others[c][r] : dots[c][r]);
          sum = fused(K::channel ? dot : dot * scales.scale, factor, sum);
          if constexpr (K::minimum) sum = fused(scales.second, floats{} + scaled_sum[r * blocks + b], sum);
        }
      }
    }
  }
  PHALANX_UNROLL
  for (int c = 0; c < kGroups; ++c) {
    const std::int64_t first = (group + c) * kLanes + lane;
    if (first >= part.outputs) break;
    const int count = part.outputs - first < kWidth ? static_cast<int>(part.outputs - first) : kWidth;
    floats bias = {};
    if (product.bias != nullptr) {
      switch (product.bias_type) {
        case Number::f32: bias = bias_of<float>(product, part.column + first, count); break;
        case Number::bf16: bias = bias_of<bf16>(product, part.column + first, count); break;
        case Number::f16: bias = bias_of<f16>(product, part.column + first, count); break;
      }
    }
    PHALANX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      floats sum = total[c][r];
      if constexpr (K::channel) sum *= load<floats>(packed + c * shape.bytes + shape.tail + 4 * lane);
      sum += bias;
      switch (product.type) {
        case Number::f32: put<float>(product, part.column + first, count, row + r, sum); break;
        case Number::bf16: put<bf16>(product, part.column + first, count, row + r, sum); break;
        case Number::f16: put<f16>(product, part.column + first, count, row + r, sum); break;
      }
    }
  }
}

template <BlockKind kKind, int kRows, int kGroups>
void tiles(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
           std::size_t row, std::size_t after) {
  for (int lane = 0; lane < kLanes; lane += kWidth)
    tile<kKind, kRows, kGroups>(product, part, shape, group, row, lane, after);
}

// Rows and groups of a tile, as far as the registers reach: rows share the unpacking of weights, groups the activations.
constexpr int kMostRows = 4;
#if defined(__AVX512F__)
constexpr int kMostGroups = 2;
#else
constexpr int kMostGroups = 1;
#endif

template <BlockKind kKind, int kGroups>
void multiply_groups(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
                     std::size_t row, std::size_t row_end, std::size_t after) {
  for (; row_end - row >= kMostRows; row += kMostRows)
    tiles<kKind, kMostRows, kGroups>(product, part, shape, group, row, after);
  if (row_end - row >= 2) {
    tiles<kKind, 2, kGroups>(product, part, shape, group, row, after);
    row += 2;
  }
  if (row_end > row) tiles<kKind, 1, kGroups>(product, part, shape, group, row, after);
}

// The groups after the present ones are fetched, but not those that another thread will read.
template <BlockKind kKind>
void multiply_kind(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
                   std::size_t row_begin, std::size_t row_end) {
  const GroupShape shape(Kind<kKind>::layout, product.rows.blocks, part.phase, static_cast<int>(part.shift));
  std::size_t group = group_begin;
  for (; group_end - group >= kMostGroups; group += kMostGroups) {
    const std::size_t after = group + kMostGroups < group_end ? kMostGroups * shape.bytes : 0;
    multiply_groups<kKind, kMostGroups>(product, part, shape, group, row_begin, row_end, after);
  }
  if (group < group_end) multiply_groups<kKind, 1>(product, part, shape, group, row_begin, row_end, 0);
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
    PHALANX_CASE(int4)
#undef PHALANX_CASE
    default: break;
  }
}

constexpr std::int32_t kInfinite = 0x7f800000;
constexpr float kTiny = 1e-30f, kMagic = 12582912.0f;  // 1.5 · 2^23

#if defined(__AVX512VNNI__)
// The largest of v[0], v[1], v[2] and v[3], in the first four lanes.
PHALANX_INLINE __m512i largest_of(const __m512i (&v)[4]) {
  const __m512i a = _mm512_max_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i b = _mm512_max_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i quarters = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m512i halves = _mm512_max_epi32(quarters, _mm512_shuffle_i32x4(quarters, quarters, 0x4e));
  return _mm512_max_epi32(halves, _mm512_shuffle_i32x4(halves, halves, 0xb1));
}

// Four whole blocks at once: what is the same for the lanes of a block is computed for four blocks together.
template <typename T>
PHALANX_INLINE void quantize_four(const T* x, std::int8_t* q, float* scale, float* scaled_sum, std::int32_t* offset) {
  __m512 v[8];
  __m512i most_of[4];
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int i = 0; i < 8; ++i) v[i] = (__m512)load16(x + 16 * i);
  for (int b = 0; b < 4; ++b)
    most_of[b] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(v[2 * b]), magnitude),
                                  _mm512_and_si512(_mm512_castps_si512(v[2 * b + 1]), magnitude));
  const __m128i bits = _mm512_castsi512_si128(largest_of(most_of));
  const __m128 most = _mm_castsi128_ps(bits), full = _mm_set1_ps(127.0f);
  const __mmask8 finite = _mm_cmplt_epi32_mask(bits, _mm_set1_epi32(kInfinite));
  const __mmask8 counts = finite & _mm_cmp_ps_mask(most, _mm_set1_ps(kTiny), _CMP_GE_OQ);
  const __m128 factors = _mm_maskz_div_ps(counts, full, most);
  const __m128 units = _mm_mask_blend_ps(finite, _mm_set1_ps(__builtin_nanf("")), _mm_maskz_div_ps(counts, most, full));
  const __m512 magic = _mm512_set1_ps(kMagic);
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m128i sums[2];
  for (int pair = 0; pair < 2; ++pair) {
    __m512i whole[4];
    for (int i = 0; i < 4; ++i) {
      const int b = 2 * pair + i / 2;
      const __m512 factor = _mm512_permutexvar_ps(_mm512_set1_epi32(b), _mm512_castps128_ps512(factors));
      const __m512 moved = _mm512_add_ps(_mm512_mul_ps(v[4 * pair + i], factor), magic);
      const __mmask16 all = counts >> b & 1 ? 0xffff : 0;
      whole[i] = _mm512_maskz_sub_epi32(all, _mm512_castps_si512(moved), _mm512_set1_epi32(0x4b400000));
    }
    const __m512i mixed =
        _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
    const __m512i bytes = _mm512_permutexvar_epi32(in_order, mixed);
    store(q + 64 * pair, bytes);
    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_CDAB));
    sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
    sums[pair] = _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, sum));
    store(offset + 4 * pair, _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(sums[pair], 3)));
  }
  store(scale, units);
  store(scaled_sum, _mm_mul_ps(units, _mm_cvtepi32_ps(_mm_hadd_epi32(sums[0], sums[1]))));
}
#endif

// Magnitudes are compared as integers, which order them as the floats they are, and above all of those Inf and NaN.
template <typename T>
void quantize_row(const T* x, std::size_t columns, std::size_t lead, std::size_t blocks, std::int8_t* q, float* scale,
                  float* scaled_sum, std::int32_t* offset) {
  std::size_t begun = 0;
#if defined(__AVX512VNNI__)
  if (lead == 0)
    for (; (begun + 4) * kBlock <= columns; begun += 4)
      quantize_four(x + begun * kBlock, q + begun * kBlock, scale + begun, scaled_sum + begun, offset + 2 * begun);
#endif
  for (std::size_t b = begun; b < blocks; ++b) {
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
    const std::int32_t bits = largest(larger((i32x16)first & 0x7fffffff, (i32x16)second & 0x7fffffff));
    float most;
    std::memcpy(&most, &bits, sizeof most);
    const bool finite = bits < kInfinite, tiny = !(most >= kTiny);
    const float factor = finite && !tiny ? 127.0f / most : 0.0f;
    const float unit = finite ? (tiny ? 0.0f : most / 127.0f) : __builtin_nanf("");
    // Adding kMagic rounds to an integer, to even at a tie, and leaves it in the low bits.
    const f32x16 magic = splat(kMagic);
    i32x16 low = {}, high = {};
    if (factor != 0.0f) {
      low = (i32x16)(first * factor + magic) - 0x4b400000;
      high = (i32x16)(second * factor + magic) - 0x4b400000;
    }
    store(q + b * kBlock, __builtin_convertvector(low, s8x16));
    store(q + b * kBlock + 16, __builtin_convertvector(high, s8x16));
    const std::int32_t sums[2] = {sum(low), sum(high)};
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

template <typename T>
void round_row(const float* x, T* y, std::size_t count) {
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) store16(y + i, load16(x + i));
  if (i < count) store_some(y + i, load_some(x + i, static_cast<int>(count - i)), static_cast<int>(count - i));
}

void round(const float* x, Number type, void* y, std::size_t count) {
  switch (type) {
    case Number::f32: return round_row(x, static_cast<float*>(y), count);
    case Number::bf16: return round_row(x, static_cast<bf16*>(y), count);
    case Number::f16: return round_row(x, static_cast<f16*>(y), count);
  }
}

}  // namespace

const BlockMatmul block_matmul = {quantize, multiply, round};

}  // namespace phalanx::PHALANX_ISA
