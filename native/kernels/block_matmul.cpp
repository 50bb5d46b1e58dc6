#include "block_kernels.hpp"

namespace phalanx::PHALANX_ISA {
namespace {

using s8x16 = std::int8_t __attribute__((vector_size(16)));

PHALANX_INLINE std::int32_t four(const std::int8_t* q) {
  std::int32_t v;
  std::memcpy(&v, q, sizeof v);
  return v;
}

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

// kRows rows times the outputs from `lane` on of kGroups groups; what is `after` bytes further is fetched meanwhile, and
// what `fetcher` has if it may. What is added to a result, and in which order, is the same for every kRows and kGroups:
// block by block, the block's integers exactly.
template <BlockKind kKind, int kRows, int kGroups, bool kFetches>
void tile(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
          std::size_t row, int lane, std::size_t after, Fetcher& fetcher) {
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
      const Dots begin = less_zeros<kKind>(offset + (r * blocks + b) * 2);
      PHALANX_UNROLL
      for (int c = 0; c < kGroups; ++c) {
        dots[c][r] = begin.dot;
        others[c][r] = begin.second;
      }
    }
    if constexpr (kFetches) fetcher.next();
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
        const ints dot = kTwoSums && !K::halves ? dots[c][r] + others[c][r] : dots[c][r];
        total[c][r] = add_block<kKind>(total[c][r], {dot, others[c][r]}, scales, scale[r * blocks + b],
                                       scaled_sum[r * blocks + b]);
      }
    }
  }
  PHALANX_UNROLL
  for (int c = 0; c < kGroups; ++c) finish<kKind, kRows>(product, part, shape, group + c, row, lane, total[c]);
}

template <BlockKind kKind, int kRows, int kGroups, bool kFetches = false>
void tiles(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
           std::size_t row, std::size_t after, Fetcher& fetcher) {
  for (int lane = 0; lane < kLanes; lane += kWidth)
    tile<kKind, kRows, kGroups, kFetches>(product, part, shape, group, row, lane, after, fetcher);
}

// Rows and groups of a tile, as far as the registers reach: rows share the unpacking of weights, groups the activations.
constexpr int kMostRows = 4;
#if defined(__AVX512F__)
constexpr int kMostGroups = 2;
#else
constexpr int kMostGroups = 1;
#endif

// The first rows wait for their weights; those after them have time for the fetcher.
template <BlockKind kKind, int kGroups>
void multiply_groups(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
                     std::size_t row_begin, std::size_t row_end, std::size_t after, Fetcher& fetcher) {
  std::size_t row = row_begin;
  for (; row_end - row >= kMostRows; row += kMostRows)
    if (row > row_begin && fetcher.more())
      tiles<kKind, kMostRows, kGroups, true>(product, part, shape, group, row, after, fetcher);
    else
      tiles<kKind, kMostRows, kGroups>(product, part, shape, group, row, after, fetcher);
  if (row_end - row >= 2) {
    tiles<kKind, 2, kGroups>(product, part, shape, group, row, after, fetcher);
    row += 2;
  }
  if (row_end > row) tiles<kKind, 1, kGroups>(product, part, shape, group, row, after, fetcher);
}

// The groups after the present ones are fetched, but not those that another thread will read.
template <BlockKind kKind>
void multiply_kind(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
                   std::size_t row_begin, std::size_t row_end, const AheadPart& ahead) {
  const GroupShape shape(Kind<kKind>::layout, product.rows.blocks, part.phase, static_cast<int>(part.shift));
  Fetcher fetcher(ahead);
  std::size_t group = group_begin;
  for (; group_end - group >= kMostGroups; group += kMostGroups) {
    const std::size_t after = group + kMostGroups < group_end ? kMostGroups * shape.bytes : 0;
    multiply_groups<kKind, kMostGroups>(product, part, shape, group, row_begin, row_end, after, fetcher);
  }
  if (group < group_end) multiply_groups<kKind, 1>(product, part, shape, group, row_begin, row_end, 0, fetcher);
}

void multiply(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
              std::size_t row_begin, std::size_t row_end, const AheadPart& ahead) {
  switch (static_cast<BlockKind>(part.kind)) {
#define PHALANX_CASE(kind) \
  case BlockKind::kind: \
    return multiply_kind<BlockKind::kind>(product, part, group_begin, group_end, row_begin, row_end, ahead);
    PHALANX_EACH_KIND(PHALANX_CASE)
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
  const std::size_t whole = columns / kBlock;
  if (lead == 0 && whole >= 4) {
    for (; begun < whole; begun += 4) {
      const std::size_t b = begun + 4 <= whole ? begun : whole - 4;  // some twice rather than one by one
      quantize_four(x + b * kBlock, q + b * kBlock, scale + b, scaled_sum + b, offset + 2 * b);
    }
    begun = whole;
  }
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
