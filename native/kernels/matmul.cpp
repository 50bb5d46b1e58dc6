#include "matmul.hpp"

#include "vec.hpp"

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
constexpr int kAhead = 4096;  // bytes that are fetched in advance

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

template <typename Width>
PHALANX_INLINE void fetch_ahead(const void* line, Width width) {
  const char* at = static_cast<const char*>(line) + kAhead;
  __builtin_prefetch(at);
  if (width.width > 16) __builtin_prefetch(at + 64);
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
void multiply_tile(const float* w, Width width, const void* tile, int depth, float* sums, bool carry) {
  const float* x = static_cast<const float*>(tile);
  reg acc[R][kRegisters];
  begin(acc, sums, carry);
  for (int k = 0; k < depth; ++k, w += width.width, x += R) {
    fetch_ahead(w, width);
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
void multiply_tile(const bf16* w, Width width, const void* tile, int depth, float* sums, bool carry) {
  const char* x = static_cast<const char*>(tile);
  auto number = [&](int r) { return _mm512_set1_epi32(load<int>(x + 4 * r)); };
  reg acc[R][kRegisters];
  begin(acc, sums, carry);
  for (int k = 0; k + 1 < depth; k += 2, w += 2 * width.width, x += 4 * R) {
    fetch_ahead(w, width);
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
void multiply_tile(const bf16* w, Width width, const void* tile, int depth, float* sums, bool carry) {
  const float* x = static_cast<const float*>(tile);
  auto number = [&](int r) { return reg{} + x[r]; };
  reg acc[R][kRegisters];
  begin(acc, sums, carry);
  for (int k = 0; k + 1 < depth; k += 2, w += 2 * width.width) {
    fetch_ahead(w, width);
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
                                bool carry) {
  if (rows == R) return multiply_tile<R>(block, width, tile, depth, sums, carry);
  if constexpr (R > 1) choose_rows<R - 1>(block, width, tile, rows, depth, sums, carry);
}

template <typename T>
void multiply(const T* block, int width, const void* tile, int rows, int depth, float* sums, bool carry) {
  if (width == kBlockOutputs)
    choose_rows<kRows>(block, Whole{}, tile, rows, depth, sums, carry);
  else
    choose_rows<kRows>(block, Part{width}, tile, rows, depth, sums, carry);
}

void tile_f32(const float* x, std::size_t stride, int rows, int depth, void* tile) {
  float* to = static_cast<float*>(tile);
  for (int k = 0; k < depth; ++k)
    for (int r = 0; r < rows; ++r) *to++ = x[r * stride + k];
}

void tile_bf16(const bf16* x, std::size_t stride, int rows, int depth, void* tile) {
  std::uint32_t* to = static_cast<std::uint32_t*>(tile);
#if defined(__AVX512BF16__)
  for (int k = 0; k + 1 < depth; k += 2)
    for (int r = 0; r < rows; ++r) *to++ = load<std::uint32_t>(x + r * stride + k);
  if (depth % 2)
    for (int r = 0; r < rows; ++r) *to++ = x[r * stride + depth - 1];
#else
  for (int k = 0; k < depth; ++k)
    for (int r = 0; r < rows; ++r) *to++ = static_cast<std::uint32_t>(x[r * stride + k]) << 16;
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
