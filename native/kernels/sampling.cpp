#include "sampling.hpp"

#include "vec.hpp"
#include "vec_math.hpp"

namespace phalanx::PHALANX_ISA {
namespace {

using mask = std::uint32_t;

// One bit for each lane that is all ones.
PHALANX_INLINE mask bits(i32x16 lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
  union { i32x16 v; __m256 h[2]; } x{lanes};
  return static_cast<mask>(_mm256_movemask_ps(x.h[0])) | static_cast<mask>(_mm256_movemask_ps(x.h[1])) << 8;
#else
  mask m = 0;
  for (int i = 0; i < 16; ++i) m |= static_cast<mask>(lanes[i] & 1) << i;
  return m;
#endif
}
PHALANX_INLINE mask first_lanes(int count) { return count == 16 ? 0xffffu : (1u << count) - 1u; }
PHALANX_INLINE f32x16 get(const float* p, int count) { return count == 16 ? load16(p) : load_some(p, count); }
// f(i, count) for every sixteen numbers, and for what is left at the end.
template <typename F>
PHALANX_INLINE void each16(int from, int count, F f) {
  int i = from;
  for (; i + 16 <= count; i += 16) f(i, 16);
  if (i < count) f(i, count - i);
}
PHALANX_INLINE u32x16 lanes() { return u32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

Best best(const float* x, int count) {
  const float lowest = -__builtin_inff();
  f32x16 a = splat(lowest), b = a;
  i32x16 odd = {};
  int i = 0;
  for (; i + 32 <= count; i += 32) {
    const f32x16 v = load16(x + i), w = load16(x + i + 16);
    a = v > a ? v : a;
    b = w > b ? w : b;
    odd |= (v != v) | (w != w);
  }
  each16(i, count, [&](int at, int n) {
    f32x16 v = splat(lowest);
    std::memcpy(&v, x + at, n * sizeof(float));
    a = v > a ? v : a;
    odd |= v != v;
  });
  if (bits(odd)) {
    for (int at = 0;; ++at)
      if (x[at] != x[at]) return {x[at], at};
  }
  a = b > a ? b : a;
  float most = a[0];
  for (int lane = 1; lane < 16; ++lane) most = a[lane] > most ? a[lane] : most;
  for (i = 0; i + 16 <= count; i += 16)
    if (bits(load16(x + i) == most)) break;
  while (i < count && x[i] != most) ++i;
  return {most, i};
}

double sum_exp(const float* x, int count, float best, float inverse) {
  constexpr int kPart = 4096;  // few enough for sums in float32
  double total = 0;
  for (int start = 0; start < count; start += kPart) {
    const int end = start + kPart < count ? start + kPart : count;
    f32x16 a = {}, b = {};
    int i = start;
    for (; i + 32 <= end; i += 32) {
      a += exp((load16(x + i) - best) * inverse);
      b += exp((load16(x + i + 16) - best) * inverse);
    }
    each16(i, end, [&](int at, int n) {
      f32x16 v = splat(-__builtin_inff());
      std::memcpy(&v, x + at, n * sizeof(float));
      a += exp((v - best) * inverse);
    });
    total += sum(a + b);
  }
  return total;
}

int above(const float* x, int count, float floor, int* columns) {
  int found = 0;
  each16(0, count, [&](int i, int n) {
    for (mask m = bits(get(x + i, n) > floor) & first_lanes(n); m; m &= m - 1)
      columns[found++] = i + __builtin_ctz(m);
  });
  return found;
}

std::int64_t before(const float* x, int count, float own, int column) {
  i32x16 larger = {}, equal = {};
  each16(0, count, [&](int i, int n) {
    const f32x16 v = get(x + i, n);
    const i32x16 in = (i32x16)(lanes() < static_cast<std::uint32_t>(n));
    larger -= (v > own) & in;
    equal -= (v == own) & in & (i32x16)(lanes() + static_cast<std::uint32_t>(i) < static_cast<std::uint32_t>(column));
  });
  std::int64_t total = 0;
  for (int lane = 0; lane < 16; ++lane) total += larger[lane] + equal[lane];
  return total;
}

PHALANX_INLINE u32x16 mix(u32x16 words) {
  words ^= words >> 16;
  words *= 0x7feb352du;
  words ^= words >> 15;
  words *= 0x846ca68bu;
  return words ^ (words >> 16);
}

int contenders(const float* x, int count, const Race& race, float bound, int* from, int* columns, int room) {
  int found = 0, i = *from;
  for (; i < count && found + 16 <= room; i += 16) {
    const int n = count - i < 16 ? count - i : 16;
    const u32x16 tokens = lanes() + (race.first + static_cast<std::uint32_t>(i));
    const u32x16 words = mix(mix(tokens ^ race.low) + race.high);
    const f32x16 times = exp((race.best - get(x + i, n)) * race.inverse) *
                         (__builtin_convertvector(words, f32x16) + 0.5f);
    for (mask m = bits(times <= bound) & first_lanes(n); m; m &= m - 1) columns[found++] = i + __builtin_ctz(m);
  }
  *from = i;
  return found;
}

}  // namespace

const Sampling sampling = {best, sum_exp, above, before, contenders};

}  // namespace phalanx::PHALANX_ISA
