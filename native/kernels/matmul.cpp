#include "matmul.hpp"

#include "vec.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own _mm512_undefined_epi32
#endif

namespace phalanx::PHALANX_ISA {
namespace {

// A register of the processor, and how many rows of x the accumulators of a block leave room for.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 14;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 3;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 3;
#else
constexpr int kLanes = 4, kRows = 1;
#endif
constexpr int kRegisters = kBlockOutputs / kLanes;

using reg = float __attribute__((vector_size(4 * kLanes)));
using word = std::uint32_t __attribute__((vector_size(4 * kLanes)));

PHALANX_INLINE reg multiply_add(reg a, reg b, reg c) {
#if defined(__AVX512F__)
  return (reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// Register j of a line of a block: `width` words.
struct Whole {
  static constexpr int width = kBlockOutputs;
  template <typename V, typename T>
  PHALANX_INLINE V at(const T* line, int j) const {
    return load<V>(reinterpret_cast<const std::uint32_t*>(line) + j * kLanes);
  }
};
struct Part {
  int width;
  template <typename V, typename T>
  PHALANX_INLINE V at(const T* line, int j) const {
    const int left = width - j * kLanes, count = left < 0 ? 0 : left < kLanes ? left : kLanes;
    const std::uint32_t* from = reinterpret_cast<const std::uint32_t*>(line) + j * kLanes;
#if defined(__AVX512F__)
    return (V)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
    std::uint32_t words[kLanes] = {};
    std::memcpy(words, from, 4 * count);
    return load<V>(words);
#endif
  }
};

// acc[r][j] = step(acc[r][j], register j of the line, number r of x), what is fewer kept in registers.
template <int R, typename W, typename X, typename Step>
PHALANX_INLINE void step_all(reg (&acc)[R][kRegisters], W weight, X x, Step step) {
  if constexpr (R >= kRegisters) {
    decltype(weight(0)) w[kRegisters];
    for (int j = 0; j < kRegisters; ++j) w[j] = weight(j);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto number = x(r);
      for (int j = 0; j < kRegisters; ++j) acc[r][j] = step(acc[r][j], w[j], number);
    }
  } else {
    decltype(x(0)) numbers[R];
    for (int r = 0; r < R; ++r) numbers[r] = x(r);
#pragma GCC unroll 8
    for (int j = 0; j < kRegisters; ++j) {
      const auto w = weight(j);
      for (int r = 0; r < R; ++r) acc[r][j] = step(acc[r][j], w, numbers[r]);
    }
  }
}

PHALANX_INLINE void fetch_ahead(const char*& at, int step) {
  __builtin_prefetch(at);
  __builtin_prefetch(at + 64);
  at += step;
}

template <int R>
PHALANX_INLINE void begin(reg (&acc)[R][kRegisters], const float* sums, bool carry) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kRegisters; ++j) acc[r][j] = carry ? load<reg>(sums + r * kBlockOutputs + j * kLanes) : reg{};
}
template <int R>
PHALANX_INLINE void end(const reg (&acc)[R][kRegisters], float* sums) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kRegisters; ++j) store(sums + r * kBlockOutputs + j * kLanes, acc[r][j]);
}

PHALANX_INLINE reg fused(reg acc, reg w, reg x) { return multiply_add(w, x, acc); }

template <int R, typename Width>
void multiply_tile(const float* w, Width width, const void* tile, int depth, float* sums, bool carry,
                   Fetch fetch) {
  const float* x = static_cast<const float*>(tile);
  reg acc[R][kRegisters];
  begin(acc, sums, carry);
  for (int k = 0; k < depth; ++k, w += width.width, x += R) {
    fetch_ahead(fetch.at, fetch.step);
    step_all(acc, [&](int j) { return width.template at<reg>(w, j); }, [&](int r) { return reg{} + x[r]; }, fused);
  }
  end(acc, sums);
}

// The last, single numbers of an odd depth, as the lower halves of words.
PHALANX_INLINE void widen(const bf16* w, int width, std::uint32_t* words) {
  for (int i = 0; i < kBlockOutputs; ++i) words[i] = i < width ? w[i] : 0;
}

#if defined(__AVX512BF16__)

PHALANX_INLINE reg pairs(reg acc, __m512i w, __m512i x) {
  return (reg)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
}

template <int R, typename Width>
void multiply_tile(const bf16* w, Width width, const void* tile, int depth, float* sums, bool carry,
                   Fetch fetch) {
  const char* x = static_cast<const char*>(tile);
  auto number = [&](int r) { return _mm512_set1_epi32(load<int>(x + 4 * r)); };
  reg acc[R][kRegisters];
  begin(acc, sums, carry);
  for (int k = 0; k + 1 < depth; k += 2, w += 2 * width.width, x += 4 * R) {
    fetch_ahead(fetch.at, fetch.step);
    step_all(acc, [&](int j) { return width.template at<__m512i>(w, j); }, number, pairs);
  }
  if (depth % 2) {
    std::uint32_t last[kBlockOutputs];
    widen(w, width.width, last);
    step_all(acc, [&](int j) { return load<__m512i>(last + j * kLanes); }, number, pairs);
  }
  end(acc, sums);
}

#else

template <int R, typename Width>
void multiply_tile(const bf16* w, Width width, const void* tile, int depth, float* sums, bool carry,
                   Fetch fetch) {
  const float* x = static_cast<const float*>(tile);
  auto number = [&](int r) { return reg{} + x[r]; };
  reg acc[R][kRegisters];
  begin(acc, sums, carry);
  for (int k = 0; k + 1 < depth; k += 2, w += 2 * width.width) {
    fetch_ahead(fetch.at, fetch.step);
    step_all(acc, [&](int j) { return (reg)(width.template at<word>(w, j) << 16); }, number, fused);
    x += R;
    step_all(acc, [&](int j) { return (reg)(width.template at<word>(w, j) & 0xffff0000u); }, number, fused);
    x += R;
  }
  if (depth % 2) {
    std::uint32_t last[kBlockOutputs];
    widen(w, width.width, last);
    step_all(acc, [&](int j) { return (reg)(load<word>(last + j * kLanes) << 16); }, number, fused);
  }
  end(acc, sums);
}

#endif

template <int R, typename T, typename Width>
PHALANX_INLINE void choose_rows(const T* block, Width width, const void* tile, int rows, int depth, float* sums,
                                bool carry, Fetch fetch) {
  if (rows == R) return multiply_tile<R>(block, width, tile, depth, sums, carry, fetch);
  if constexpr (R > 1) choose_rows<R - 1>(block, width, tile, rows, depth, sums, carry, fetch);
}

template <typename T>
void multiply(const T* block, int width, const void* tile, int rows, int depth, float* sums, bool carry,
              Fetch fetch) {
  if (width == kBlockOutputs)
    choose_rows<kRows>(block, Whole{}, tile, rows, depth, sums, carry, fetch);
  else
    choose_rows<kRows>(block, Part{width}, tile, rows, depth, sums, carry, fetch);
}

#if defined(__AVX512F__)
// Rows of 16 words to columns of 16 words.
PHALANX_INLINE void transpose(__m512i (&v)[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  for (int j = 0; j < 4; ++j) {  // a quarter of b[4 i + j] has the rows 4 i … 4 i + 3 of a column
    const __m512i even0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    const __m512i even1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i odd1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    v[j] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    v[12 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}
#endif

// to[k][r] = word k of row r, `words` of each: sixteen of them at once by `many(r, k)`, or `one(r, k)`.
template <typename Many, typename One>
PHALANX_INLINE void interleave(std::uint32_t* to, int rows, int words, Many many, One one) {
  int k = 0;
#if defined(__AVX512F__)
  const __mmask16 kept = static_cast<__mmask16>((1u << rows) - 1);
  for (; k + 16 <= words; k += 16) {
    __m512i v[16];
    for (int r = 0; r < 16; ++r) v[r] = r < rows ? (__m512i)many(r, k) : _mm512_setzero_si512();
    transpose(v);
    for (int i = 0; i < 16; ++i, to += rows) _mm512_mask_storeu_epi32(to, kept, v[i]);
  }
#else
  (void)many;
#endif
  for (; k < words; ++k)
    for (int r = 0; r < rows; ++r) *to++ = one(r, k);
}

void tile_f32(const float* x, std::size_t stride, int rows, int depth, void* tile) {
  interleave(
      static_cast<std::uint32_t*>(tile), rows, depth,
      [&](int r, int k) { return load<i32x16>(x + r * stride + k); },
      [&](int r, int k) { return load<std::uint32_t>(x + r * stride + k); });
}

void tile_bf16(const bf16* x, std::size_t stride, int rows, int depth, void* tile) {
  std::uint32_t* to = static_cast<std::uint32_t*>(tile);
#if defined(__AVX512BF16__)
  interleave(
      to, rows, depth / 2, [&](int r, int k) { return load<i32x16>(x + r * stride + 2 * k); },
      [&](int r, int k) { return load<std::uint32_t>(x + r * stride + 2 * k); });
  if (depth % 2)
    for (int r = 0; r < rows; ++r) to[(depth / 2) * rows + r] = x[r * stride + depth - 1];
#else
  interleave(
      to, rows, depth, [&](int r, int k) { return (i32x16)from_bf16(load<u16x16>(x + r * stride + k)); },
      [&](int r, int k) { return static_cast<std::uint32_t>(x[r * stride + k]) << 16; });
#endif
}

template <typename B, typename Y>
void finish(const float* sums, int rows, int width, const B* bias, Y* y, std::size_t stride) {
  for (int i = 0; i < width; i += 16) {
    const int count = width - i < 16 ? width - i : 16;
    const f32x16 added = bias == nullptr ? f32x16{} : load_some(bias + i, count);
    for (int r = 0; r < rows; ++r) {
      f32x16 v = load16(sums + r * kBlockOutputs + i);
      if (bias != nullptr) v += added;
      if (count == 16)
        store16(y + r * stride + i, v);
      else
        store_some(y + r * stride + i, v, count);
    }
  }
}

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

}  // namespace

const Matmul matmul = {
    kRows,           kPairs,          tile_f32, tile_bf16, multiply<float>, multiply<bf16>, finish<float, float>,
    finish<bf16, bf16>, finish<bf16, float>,
};

}  // namespace phalanx::PHALANX_ISA
