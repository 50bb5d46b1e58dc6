#include "attention.hpp"

#include "vec.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the intrinsics' own undefined operands
#endif

namespace phalanx::PHALANX_ISA {
namespace {

// Vectors of the register's own width here, not `vec.hpp`'s: the products below fill the registers.
#if defined(__AVX512F__)
constexpr int W = 16, kMaxRows = 6, kMaxColumns = 4;
#elif defined(__AVX2__)
constexpr int W = 8, kMaxRows = 6, kMaxColumns = 1;
#elif defined(__aarch64__)
constexpr int W = 4, kMaxRows = 6, kMaxColumns = 1;
#else
constexpr int W = 4, kMaxRows = 2, kMaxColumns = 1;
#endif
constexpr int U = 16 / W;  // vectors in 16 numbers
constexpr int kTile = kAttentionTile, kSpan = kAttentionSpan;
constexpr int kLine = 64;  // bytes: sixteen columns of one step of a product
constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
constexpr float kInfinity = __builtin_inff();

using vf = float __attribute__((vector_size(4 * W)));
using vi = std::int32_t __attribute__((vector_size(4 * W)));
using vu = std::uint32_t __attribute__((vector_size(4 * W)));
using vh = std::uint16_t __attribute__((vector_size(2 * W)));
using vb = std::int8_t __attribute__((vector_size(W)));

PHALANX_INLINE vf all(float x) { return vf{} + x; }

PHALANX_INLINE vf mul_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

PHALANX_INLINE vf widen(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
PHALANX_INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  const vu bits = (vu)x;
  const vu rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
  return __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40u, vh);
#endif
}
PHALANX_INLINE float widen(bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
PHALANX_INLINE float widen(float x) { return x; }

// 2^x, relative error below 1.2e-7 (a polynomial of degree 6 fitted on [-1/2, 1/2], exactly 1 at 0), 0 far below 2^-126;
// x up to 127.
PHALANX_INLINE vf power(vf x) {
#if defined(__AVX512F__)
  const __m512 low = _mm512_max_ps(_mm512_set1_ps(-1000.0f), (__m512)x);  // in this order NaN stays
  const vf whole = (vf)_mm512_roundscale_ps(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf low = x < all(-126.0f) ? all(-126.0f) : x;
  const vf shift = all(12582912.0f + 127.0f);  // 1.5 · 2^23 + 127: adding it rounds, and leaves the exponent's bits
  const vf shifted = low + shift;
  const vf whole = shifted - shift;
#endif
  const vf f = (vf)low - whole;
  vf y = all(0.00015353356f);
  y = mul_add(y, f, all(0.0013398876f));
  y = mul_add(y, f, all(0.009618438f));
  y = mul_add(y, f, all(0.055503324f));
  y = mul_add(y, f, all(0.24022648f));
  y = mul_add(y, f, all(0.69314718f));
  y = mul_add(y, f, all(1.0f));
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
  y *= (vf)((vi)shifted << 23);
  return x < all(-126.0f) ? vf{} : y;
#endif
}

// Horizontal, in a fixed order.
PHALANX_INLINE float sum_of(vf v) {
  float lane[W];
  store(lane, v);
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}
PHALANX_INLINE float largest(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lane[W];
  store(lane, v);
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  return lane[0];
#endif
}

constexpr int rounded_up(int n, int to) { return (n + to - 1) / to * to; }

// ---------------------------------------------------------------- products: rows of A times a tile

// Each of a result's numbers is summed in the order of the tile's keys (or of head_dim), whatever ROWS and COLUMNS are.
template <typename A, typename B>
struct Multiply;

template <>
struct Multiply<float, float> {
  static constexpr int step = 1;  // numbers of A and of each column of B that one step takes
  template <int ROWS, int VECTORS>
  static PHALANX_INLINE void run(vf (&acc)[ROWS][VECTORS], const float* const (&a)[ROWS], const float* const (&b)[VECTORS],
                                 std::size_t at_a, std::size_t at_b, bool) {
    vf x[VECTORS];
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) x[c] = load<vf>(b[c] + at_b);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const vf y = all(a[r][at_a]);
#pragma GCC unroll 16
      for (int c = 0; c < VECTORS; ++c) acc[r][c] = mul_add(y, x[c], acc[r][c]);
    }
  }
};

template <>
struct Multiply<float, bf16> {
  static constexpr int step = 2;
  template <int ROWS, int VECTORS>
  static PHALANX_INLINE void run(vf (&acc)[ROWS][VECTORS], const float* const (&a)[ROWS], const bf16* const (&b)[VECTORS],
                                 std::size_t at_a, std::size_t at_b, bool half) {
    vf x[VECTORS];
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) x[c] = (vf)(load<vu>(b[c] + at_b) << 16);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const vf y = all(a[r][at_a]);
#pragma GCC unroll 16
      for (int c = 0; c < VECTORS; ++c) acc[r][c] = mul_add(y, x[c], acc[r][c]);
    }
    if (half) return;
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) x[c] = (vf)(load<vu>(b[c] + at_b) & 0xffff0000u);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const vf y = all(a[r][at_a + 1]);
#pragma GCC unroll 16
      for (int c = 0; c < VECTORS; ++c) acc[r][c] = mul_add(y, x[c], acc[r][c]);
    }
  }
};

#if defined(__AVX512BF16__)
template <>
struct Multiply<bf16, bf16> {
  static constexpr int step = 2;
  template <int ROWS, int VECTORS>
  static PHALANX_INLINE void run(vf (&acc)[ROWS][VECTORS], const bf16* const (&a)[ROWS], const bf16* const (&b)[VECTORS],
                                 std::size_t at_a, std::size_t at_b, bool half) {
    vu x[VECTORS];
#pragma GCC unroll 16
    for (int c = 0; c < VECTORS; ++c) {
      x[c] = load<vu>(b[c] + at_b);
      if (half) x[c] &= 0xffffu;  // the second of the pair may never have been written
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      std::int32_t pair;
      std::memcpy(&pair, a[r] + at_a, 4);
      const __m512bh y = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
      for (int c = 0; c < VECTORS; ++c) acc[r][c] = (vf)_mm512_dpbf16_ps((__m512)acc[r][c], y, (__m512bh)x[c]);
    }
  }
};
#endif

// out[r][16 · GROUPS] (64 numbers apart) = a[r] · keys, `dim` numbers each; keys of 16 tokens at each of `keys`. What is
// at `next`, as much, is asked for meanwhile.
template <int ROWS, int GROUPS, typename A, typename B>
void score(const A* a, std::size_t pitch, const B* const* keys, const B* const* next, int dim, float* out) {
  constexpr int step = Multiply<A, B>::step;
  const A* rows[ROWS];
  for (int r = 0; r < ROWS; ++r) rows[r] = a + r * pitch;
  const B* columns[GROUPS * U];
  for (int c = 0; c < GROUPS * U; ++c) columns[c] = keys[c / U] + c % U * W * step;
  vf acc[ROWS][GROUPS * U] = {};
  for (int group = 0, i = 0; group < GROUPS; ++group) {
    const char* ahead = reinterpret_cast<const char*>(next[group]);
    const int end = (group + 1) * (dim / step) / GROUPS * step;
    for (; i < end; i += step, ahead += GROUPS * kLine) {
      Multiply<A, B>::run(acc, rows, columns, i, static_cast<std::size_t>(i) * 16, false);
#pragma GCC unroll 16
      for (int c = 0; c < GROUPS; ++c) __builtin_prefetch(ahead + c * kLine);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < GROUPS * U; ++c) store(out + r * kTile + c * W, acc[r][c]);
}

// out[r][16 · GROUPS] = out[r] · factor[r] + a[r] · values: `count` tokens, 16 at each of `values`, whose rows have
// `pitch` numbers; a's rows are 64 apart, out's out_pitch. `next` as above.
template <int ROWS, int GROUPS, typename A, typename B>
void mix(const A* a, const B* const* values, const B* const* next, std::size_t pitch, int first, int count,
         const float* factor, float* out, std::size_t out_pitch) {
  constexpr int step = Multiply<A, B>::step;
  vf acc[ROWS][GROUPS * U];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < GROUPS * U; ++c) acc[r][c] = load<vf>(out + r * out_pitch + c * W) * factor[r];
  for (int group = 0; group * 16 < count; ++group) {
    const A* rows[ROWS];
    for (int r = 0; r < ROWS; ++r) rows[r] = a + r * kTile + group * 16;
    const B* columns[GROUPS * U];
    for (int c = 0; c < GROUPS * U; ++c) columns[c] = values[group] + static_cast<std::size_t>(first + c * W) * step;
    const B* ahead = next[group] + static_cast<std::size_t>(first) * step;
    const int tokens = count - group * 16 < 16 ? count - group * 16 : 16;
    int t = 0;
    for (; t + step <= tokens; t += step) {
      Multiply<A, B>::run(acc, rows, columns, t, t * pitch, false);
#pragma GCC unroll 16
      for (int c = 0; c < GROUPS; ++c)
        __builtin_prefetch(reinterpret_cast<const char*>(ahead + t * pitch) + c * kLine);
    }
    if (t < tokens) Multiply<A, B>::run(acc, rows, columns, t, t * pitch, true);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < GROUPS * U; ++c) store(out + r * out_pitch + c * W, acc[r][c]);
}

template <typename A, typename B>
struct Products {
  using Score = void (*)(const A*, std::size_t, const B* const*, const B* const*, int, float*);
  using Mix = void (*)(const A*, const B* const*, const B* const*, std::size_t, int, int, const float*, float*,
                       std::size_t);
  Score scores[kMaxRows][kMaxColumns];
  Mix mixes[kMaxRows][kMaxColumns];

  constexpr Products() : scores{}, mixes{} { fill<1, 1>(); }

  template <int ROWS, int GROUPS>
  constexpr void fill() {
    scores[ROWS - 1][GROUPS - 1] = score<ROWS, GROUPS, A, B>;
    mixes[ROWS - 1][GROUPS - 1] = mix<ROWS, GROUPS, A, B>;
    if constexpr (GROUPS < kMaxColumns)
      fill<ROWS, GROUPS + 1>();
    else if constexpr (ROWS < kMaxRows)
      fill<ROWS + 1, 1>();
  }
};

template <typename A, typename B>
constexpr Products<A, B> products{};

// ---------------------------------------------------------------- the cache

struct Geometry {
  std::size_t item, tile_bytes, row_bytes, region_bytes;
  explicit Geometry(const AttentionCall& call) {
    item = call.cache_type == CacheType::f32 ? 4 : call.cache_type == CacheType::bf16 ? 2 : 1;
    const std::size_t scale = call.cache_type == CacheType::int8 ? 4 : 0;
    tile_bytes = 16 * item * call.dim;
    row_bytes = item * call.dim + scale;
    region_bytes = row_bytes * call.block_size;
  }
};

PHALANX_INLINE std::size_t region_at(const AttentionCall& call, const Geometry& g, std::int64_t block, int head) {
  const std::int64_t place = head ^ (block & ((call.kv_heads & -call.kv_heads) - 1));
  return (static_cast<std::size_t>(block) * call.kv_heads + place) * g.region_bytes;
}
PHALANX_INLINE std::size_t row_at(const AttentionCall& call, const Geometry& g, std::int64_t slot, int head) {
  return (static_cast<std::size_t>(slot) * call.kv_heads + head) * g.row_bytes;
}

struct Quantised {
  float scale, inverse;
};
// The scale of a head's numbers for int8: NaN when one of them is.
Quantised quantise(const float* x, int dim) {
  float most = 0.0f;
  for (int i = 0; i < dim; ++i) {
    const float size = __builtin_fabsf(x[i]);
    most = size > most || size != size ? size : most;
  }
  return {most / 127.0f, most > 0.0f && most < kInfinity ? 127.0f / most : 0.0f};
}
PHALANX_INLINE std::int8_t to_int8(float x, float inverse) {
  const float rounded = x * inverse + 12582912.0f - 12582912.0f;  // 1.5 · 2^23: to nearest, ties to even
  return rounded == rounded ? static_cast<std::int8_t>(static_cast<int>(rounded)) : 0;
}

// One token's head `x` (dim numbers and zeros up to a multiple of 16) into the cache; `is_key` decides the tile's order.
void write_head(const AttentionCall& call, const Geometry& g, char* cache, bool is_key, std::int64_t slot, int head,
                const float* x) {
  const int dim = call.dim;
  if (!call.tiled) {
    char* row = cache + row_at(call, g, slot, head);
    if (call.cache_type == CacheType::f32) {
      std::memcpy(row, x, 4 * static_cast<std::size_t>(dim));
    } else if (call.cache_type == CacheType::bf16) {
      for (int i = 0; i < dim; i += 16) {
        bf16 part[16];
        store(part, to_bf16(load<f32x16>(x + i)));
        std::memcpy(row + 2 * i, part, 2 * static_cast<std::size_t>(dim - i < 16 ? dim - i : 16));
      }
    } else {
      const Quantised q = quantise(x, dim);
      for (int i = 0; i < dim; ++i) reinterpret_cast<std::int8_t*>(row)[i] = to_int8(x[i], q.inverse);
      std::memcpy(row + dim, &q.scale, 4);
    }
    return;
  }
  const std::int64_t block = slot / call.block_size;
  const int offset = static_cast<int>(slot % call.block_size), lane = offset % 16;
  char* region = cache + region_at(call, g, block, head);
  char* tile = region + offset / 16 * g.tile_bytes;
  switch (call.cache_type) {
    case CacheType::f32: {
      float* to = reinterpret_cast<float*>(tile);
      if (is_key)
        for (int i = 0; i < dim; ++i) to[i * 16 + lane] = x[i];
      else
        std::memcpy(to + lane * dim, x, 4 * static_cast<std::size_t>(dim));
      break;
    }
    case CacheType::bf16: {
      bf16* to = reinterpret_cast<bf16*>(tile);
      for (int i = 0; i < dim; i += 16) {
        const u16x16 part = to_bf16(load<f32x16>(x + i));
        if (is_key) {
          std::uint32_t pairs[8];
          store(pairs, part);
          for (int j = 0; j < 8; ++j) std::memcpy(to + (i + 2 * j) * 16 + lane * 2, pairs + j, 4);
        } else {  // the other token of the pair stays
          bf16* at = to + lane / 2 * 2 * dim + i * 2;
          const u32x16 old = load<u32x16>(at), own = __builtin_convertvector(part, u32x16);
          store(at, lane % 2 ? (old & 0xffffu) | (own << 16) : (old & 0xffff0000u) | own);
        }
      }
      break;
    }
    case CacheType::int8: {
      std::int8_t* to = reinterpret_cast<std::int8_t*>(tile);
      const Quantised q = quantise(x, dim);
      for (int i = 0; i < dim; ++i) {
        const std::size_t at = is_key ? i / 2 * 32 + lane * 2 + i % 2 : lane / 2 * 2 * dim + i * 2 + lane % 2;
        to[at] = to_int8(x[i], q.inverse);
      }
      std::memcpy(region + static_cast<std::size_t>(call.block_size) * dim + 4 * offset, &q.scale, 4);
      break;
    }
  }
}

// ---------------------------------------------------------------- heads before the cache

template <typename T>
PHALANX_INLINE f32x16 load_up_to(const T* p, int count) {  // sixteen of `count` numbers, the rest zero
  return count >= 16 ? load16(p) : load_some(p, count);
}
template <typename T>
PHALANX_INLINE void store_up_to(T* p, f32x16 v, int count) {
  if (count >= 16)
    store16(p, v);
  else
    store_some(p, v, count);
}

template <typename T>
PHALANX_INLINE void read_head(const T* from, int dim, float* x) {
  for (int i = 0; i < dim; i += 16) store(x + i, load_up_to(from + i, dim - i));
}

template <typename T>
void apply_norm(const T* weight, int dim, float eps, float* x) {
  f32x16 squares = {};
  for (int i = 0; i < dim; i += 16) squares = fma(load<f32x16>(x + i), load<f32x16>(x + i), squares);
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(dim) + eps);
  for (int i = 0; i < dim; i += 16) {
    f32x16 v = load<f32x16>(x + i) * factor;
    if (weight != nullptr) v *= load_up_to(weight + i, dim - i);
    store(x + i, v);
  }
}

template <typename T>
void rotate(const T* cos, const T* sin, int dim, float* x, float* y) {  // y, of the same length, is overwritten
  const int half = dim / 2;
  std::memcpy(y, x + half, 4 * static_cast<std::size_t>(half));
  std::memcpy(y + half, x, 4 * static_cast<std::size_t>(half));
  for (int i = 0; i < dim; i += 16) {
    const f32x16 turned = fma(load_up_to(y + i, dim - i), load_up_to(sin + i, dim - i),
                              load_up_to(x + i, dim - i) * load_up_to(cos + i, dim - i));
    store_up_to(x + i, turned, dim - i);
  }
}

template <typename T>
PHALANX_INLINE const T* plus(const void* p, std::size_t numbers) {
  return static_cast<const T*>(p) + numbers;
}

// A token's query (or key) head, ready: x and y have room for dim, rounded up to 16; x is zero behind dim.
void prepare(const AttentionCall& call, int token, const void* from, std::size_t at, const void* norm, bool is_query,
             float* x, float* y) {
  if (call.type == 1)
    read_head(plus<bf16>(from, at), call.dim, x);
  else
    read_head(plus<float>(from, at), call.dim, x);
  if (call.norms) {
    if (call.norm_type == 1)
      apply_norm(static_cast<const bf16*>(norm), call.dim, call.eps, x);
    else
      apply_norm(static_cast<const float*>(norm), call.dim, call.eps, x);
  }
  if (call.rope_dim) {
    const std::size_t row = static_cast<std::size_t>(token) * call.rope_dim;
    if (call.table_type == 1)
      rotate(plus<bf16>(call.cos, row), plus<bf16>(call.sin, row), call.rope_dim, x, y);
    else
      rotate(plus<float>(call.cos, row), plus<float>(call.sin, row), call.rope_dim, x, y);
  }
  if (is_query && call.factor != nullptr) {
    const float factor =
        call.type == 1 ? widen(*plus<bf16>(call.factor, token)) : *plus<float>(call.factor, token);
    for (int i = 0; i < call.dim; i += 16) store(x + i, load<f32x16>(x + i) * factor);
  }
}

void write(const AttentionCall& call, int first, int count, int from, int to, char* scratch) {
  const Geometry g(call);
  float* x = reinterpret_cast<float*>(scratch);
  float* y = x + rounded_up(call.dim, 16);
  for (int token = first; token < first + count; ++token) {
    for (int head = from; head < to; ++head) {
      const std::size_t at = token * call.key_pitch + static_cast<std::size_t>(head) * call.dim;
      prepare(call, token, call.key, at, call.key_norm, false, x, y);
      write_head(call, g, call.key_cache, true, call.slots[token], head, x);
      if (call.type == 1)
        read_head(plus<bf16>(call.value, at), call.dim, x);
      else
        read_head(plus<float>(call.value, at), call.dim, x);
      write_head(call, g, call.value_cache, false, call.slots[token], head, x);
    }
  }
}

// ---------------------------------------------------------------- one task

struct Room {  // the parts of a scratch buffer
  float *x, *y, *acc, *total, *most, *total_most, *total_sum, *lanes, *scores, *key_scale, *value_scale;
  char *query, *shares, *keys, *values;
  std::size_t bytes;

  Room(char* base, int rows, int dim) {
    char* at = base;
    const std::size_t wide = rounded_up(dim, 16), n = rounded_up(rows, 16);
    auto take = [&at](std::size_t floats) {
      float* p = reinterpret_cast<float*>(at);
      at += (floats * 4 + 63) / 64 * 64;
      return p;
    };
    x = take(wide);
    y = take(wide);
    acc = take(rows * wide);
    total = take(rows * wide);
    most = take(n);
    total_most = take(n);
    total_sum = take(n);
    lanes = take(static_cast<std::size_t>(rows) * W);
    scores = take(kMaxRows * kTile);
    key_scale = take(kTile);
    value_scale = take(kTile);
    query = reinterpret_cast<char*>(take(rows * wide));
    shares = reinterpret_cast<char*>(take(kMaxRows * kTile));
    keys = reinterpret_cast<char*>(take(kTile * wide));
    values = reinterpret_cast<char*>(take(kTile * wide));
    bytes = static_cast<std::size_t>(at - base);
  }
};

// Exact: an int8 has no more digits than a bf16.
PHALANX_INLINE void expand32(const std::int8_t* from, bf16* to) {
#if defined(__AVX512BF16__)
  const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
  const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from + 16)));
  store(to, _mm512_cvtne2ps_pbh(b, a));
#elif defined(__AVX512F__)
  for (int i = 0; i < 32; i += 16) {
    const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from + i)));
    store(to + i, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
  }
#elif defined(__AVX2__)
  for (int i = 0; i < 32; i += 16) {
    __m256i half[2];
    for (int j = 0; j < 2; ++j) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i + 8 * j));
      half[j] = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))), 16);
    }
    store(to + i, _mm256_permute4x64_epi64(_mm256_packus_epi32(half[0], half[1]), 0xd8));
  }
#else
  for (int i = 0; i < 32; ++i) {
    const float x = from[i];
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to[i] = static_cast<bf16>(bits >> 16);
  }
#endif
}
PHALANX_INLINE void expand32(const std::int8_t* from, float* to) {  // no f32 tile is read from an int8 cache
  for (int i = 0; i < 32; ++i) to[i] = from[i];
}

// Where the 64 keys and values from a position on are, 16 each: in the cache, or copied to `room`.
template <typename B>
struct TileReader {
  const AttentionCall& call;
  const Geometry g;
  const Room& room;
  const std::int32_t* table;
  const int head;
  const bool direct;
  const std::size_t value_pitch;  // numbers from one token to the next
  const B *keys[4], *values[4];
  const B *next_keys[4], *next_values[4];  // where the next tile's are; where these are, if that is of no use
  std::size_t at[4], next[4];              // tiles in the cache
  std::size_t lead[4];                     // with which the next task begins
  int led = 0;                             // tokens of those

  TileReader(const AttentionCall& call, const Room& room, int row, int head)
      : call(call), g(call), room(room), table(call.tables + static_cast<std::size_t>(row) * call.table_width),
        head(head), direct(call.tiled && call.cache_type != CacheType::int8),
        value_pitch(direct ? call.dim : rounded_up(call.dim, 16)) {}

  // Where the tiles are with which the next task begins, `count` tokens of them: asked for during the last tile.
  void lead_to(const AttentionCall& call, const AttentionTask* task) {
    if (task == nullptr || !direct) return;
    const int oldest = call.window == 0 || task->position < call.window ? 0 : task->position - call.window + 1;
    const int begin = task->first_span * kSpan, first = begin < oldest ? oldest / kTile * kTile : begin;
    const int there = task->position + task->count - first;
    led = there < kTile ? there : kTile;
    const std::int32_t* other = call.tables + static_cast<std::size_t>(task->row) * call.table_width;
    for (int group = 0; group * 16 < led; ++group) {
      const int position = first + group * 16, offset = position % call.block_size;
      lead[group] = region_at(call, g, other[position / call.block_size], task->kv_head) + offset / 16 * g.tile_bytes;
    }
  }

  // Finds the tiles of the `count` tokens from `first` on, which `read` is called for next, and asks for them.
  void begin(int first, int count) {
    if (!call.tiled) return;
    find(first, count);
    for (int group = 0; group * 16 < count; ++group) {
      for (std::size_t i = 0; i < g.tile_bytes; i += kLine) {
        __builtin_prefetch(call.key_cache + next[group] + i);
        __builtin_prefetch(call.value_cache + next[group] + i);
      }
    }
  }

  void find(int first, int count) {
    for (int group = 0; group * 16 < count; ++group) {
      const int position = first + group * 16, offset = position % call.block_size;
      next[group] = region_at(call, g, table[position / call.block_size], head) + offset / 16 * g.tile_bytes;
    }
  }

  // The tile at `first`, of which `count` tokens are there; of the one behind it, `more`.
  void read(int first, int count, int more) {
    if (!call.tiled) {
      for (int group = 0; group * 16 < count; ++group)
        gather(group, first + group * 16, count - group * 16 < 16 ? count - group * 16 : 16);
    } else {
      std::memcpy(at, next, sizeof at);
      find(first + kTile, more);
      for (int group = 0; group * 16 < count; ++group) {
        if (direct) {
          keys[group] = reinterpret_cast<const B*>(call.key_cache + at[group]);
          values[group] = reinterpret_cast<const B*>(call.value_cache + at[group]);
        } else {
          expand(group, (first + group * 16) % call.block_size, group * 16 < more ? next[group] : at[group]);
        }
      }
    }
    const bool last = more == 0 && led > 0;
    if (last) more = led;
    for (int group = 0; group * 16 < count; ++group) {
      const bool ask = direct && group * 16 < more;
      const std::size_t* next = last ? lead : this->next;
      next_keys[group] = ask ? reinterpret_cast<const B*>(call.key_cache + next[group]) : keys[group];
      next_values[group] = ask ? reinterpret_cast<const B*>(call.value_cache + next[group]) : values[group];
    }
  }

  // A tile of int8 into one of bf16, in the same order; `ahead` is asked for.
  void expand(int group, int offset, std::size_t ahead) {
    const std::size_t numbers = 16 * static_cast<std::size_t>(call.dim), tile = at[group];
    B* k = reinterpret_cast<B*>(room.keys) + group * numbers;
    B* v = reinterpret_cast<B*>(room.values) + group * numbers;
    for (std::size_t i = 0; i < numbers; i += 64) {
      __builtin_prefetch(call.key_cache + ahead + i);
      __builtin_prefetch(call.value_cache + ahead + i);
      for (int j = 0; j < 64; j += 32) {
        expand32(reinterpret_cast<const std::int8_t*>(call.key_cache + tile + i + j), k + i + j);
        expand32(reinterpret_cast<const std::int8_t*>(call.value_cache + tile + i + j), v + i + j);
      }
    }
    // Scales are behind the block's tiles.
    const std::size_t scales = tile - offset / 16 * g.tile_bytes + call.block_size / 16 * g.tile_bytes + 4 * offset;
    std::memcpy(room.key_scale + group * 16, call.key_cache + scales, 64);
    std::memcpy(room.value_scale + group * 16, call.value_cache + scales, 64);
    keys[group] = k;
    values[group] = v;
  }

  // `count` tokens of a cache in rows, into tiles.
  void gather(int group, int position, int count) {
    const std::size_t wide = rounded_up(call.dim, 16);
    B* k = reinterpret_cast<B*>(room.keys) + group * 16 * wide;
    B* v = reinterpret_cast<B*>(room.values) + group * 16 * wide;
    for (int t = 0; t < count; ++t) {
      const std::int64_t slot =
          static_cast<std::int64_t>(table[(position + t) / call.block_size]) * call.block_size +
          (position + t) % call.block_size;
      const char* key = call.key_cache + row_at(call, g, slot, head);
      const char* value = call.value_cache + row_at(call, g, slot, head);
      if (call.cache_type == CacheType::int8) {
        std::memcpy(room.key_scale + group * 16 + t, key + call.dim, 4);
        std::memcpy(room.value_scale + group * 16 + t, value + call.dim, 4);
      }
      for (int i = 0; i < static_cast<int>(wide); ++i) {
        const B a = i < call.dim ? number(key, i) : B(0), b = i < call.dim ? number(value, i) : B(0);
        if constexpr (sizeof(B) == 4) {
          k[i * 16 + t] = a;
          v[t * wide + i] = b;
        } else {
          k[i / 2 * 32 + t * 2 + i % 2] = a;
          v[t / 2 * 2 * wide + i * 2 + t % 2] = b;
        }
      }
    }
    keys[group] = k;
    values[group] = v;
  }

  PHALANX_INLINE B number(const char* row, int i) const {
    B result;
    if constexpr (sizeof(B) == 2) {
      if (call.cache_type == CacheType::int8) {
        const float x = reinterpret_cast<const std::int8_t*>(row)[i];
        std::uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return static_cast<B>(bits >> 16);
      }
    }
    std::memcpy(&result, row + i * sizeof(B), sizeof(B));
    return result;
  }
};

// The scores of ROWS <= kMaxRows queries to shares of their keys, 2^(score - maximum); maximum and sum of the row go on
// from before, and `before` is the factor for what was summed until then. Query i sees the keys low[i] to high[i] of the
// 16 · groups.
template <typename A>
PHALANX_INLINE void soften(const AttentionCall& call, const Room& room, int rows, int groups, const int* low,
                           const int* high, float* most, float* lanes, A* shares, float* before) {
  const int vectors = groups * U;
  const bool scaled = call.cache_type == CacheType::int8;
  const float cap = call.soft_cap;
  const float factor = cap != 0.0f ? 1.0f : call.scale * kLog2e;
  alignas(64) float top[16], base[16], fresh[16];
  for (int r = 0; r < 16; ++r) top[r] = fresh[r] = -kInfinity;
  for (int r = 0; r < rows; ++r) {
    float* scores = room.scores + r * kTile;
    vf highest = all(-kInfinity);
    if (scaled || cap != 0.0f || low[r] > 0 || high[r] < groups * 16 - 1) {
      vi lane;
      for (int i = 0; i < W; ++i) lane[i] = i;
      for (int c = 0; c < vectors; ++c, lane += W) {
        vf t = load<vf>(scores + c * W);
        if (scaled) t *= load<vf>(room.key_scale + c * W);
        if (cap != 0.0f) {  // cap · tanh(s / cap) = cap - 2 cap / (exp(2 s / cap) + 1)
          const vf twice = t * all(2.0f * kLog2e * call.scale / cap);
          const vf e = power(twice > all(126.0f) ? all(126.0f) : twice);
          t = all(cap * kLog2e) - all(2.0f * cap * kLog2e) / (e + 1.0f);
        }
        t = (lane < low[r]) | (lane > high[r]) ? all(-kInfinity) : t;
        store(scores + c * W, t);
        highest = t > highest ? t : highest;
      }
    } else {
      for (int c = 0; c < vectors; ++c) {
        const vf t = load<vf>(scores + c * W);
        highest = t > highest ? t : highest;
      }
    }
    top[r] = largest(highest) * factor;
    fresh[r] = most[r];
  }
  for (int i = 0; i < 16 && i < rows; i += W) {
    const vf old = load<vf>(fresh + i), reached = load<vf>(top + i);
    const vf next = reached > old ? reached : old;
    const vf from = next == all(-kInfinity) ? vf{} : next;
    store(base + i, from);
    store(fresh + i, next);
    store(top + i, power(old - from));
  }
  for (int r = 0; r < rows; ++r) {
    const float* scores = room.scores + r * kTile;
    const vf from = all(-base[r]), scale = all(factor);
    most[r] = fresh[r];
    before[r] = top[r];
    vf lane_sum = load<vf>(lanes + r * W) * top[r];
    A* to = shares + r * kTile;
    for (int c = 0; c < vectors; ++c) {
      vf p = power(mul_add(load<vf>(scores + c * W), scale, from));
      lane_sum += p;
      if (scaled) {
        const vf weighed = p * load<vf>(room.value_scale + c * W);
        p = p == vf{} ? p : weighed;  // the scale of a token that is not there may be anything
      }
      if constexpr (sizeof(A) == 4)
        store(to + c * W, p);
      else
        store(to + c * W, narrow(p));
    }
    store(lanes + r * W, lane_sum);
  }
}

// (maximum, sum, output) of one row joined with those of a later span.
void join(float& most, float& sum, float* out, float most2, float sum2, const float* out2, int wide) {
  const float next = most2 > most ? most2 : most;
  if (next == -kInfinity) return;
  const float mine = power(all(most - next))[0], theirs = power(all(most2 - next))[0];
  most = next;
  sum = sum * mine + sum2 * theirs;
  for (int i = 0; i < wide; i += W)
    store(out + i, mul_add(load<vf>(out2 + i), all(theirs), load<vf>(out + i) * mine));
}

void finish(const AttentionCall& call, int token, int head, float most, float sum, const float* out) {
  const std::size_t row = static_cast<std::size_t>(token) * call.heads + head;
  const float inverse = 1.0f / sum;
  for (int i = 0; i < call.dim; i += 16) {
    const f32x16 v = load<f32x16>(out + i) * inverse;
    if (call.type == 1)
      store_up_to(static_cast<bf16*>(call.out) + row * call.dim + i, v, call.dim - i);
    else
      store_up_to(static_cast<float*>(call.out) + row * call.dim + i, v, call.dim - i);
  }
  if (call.lse != nullptr) call.lse[row] = (most + static_cast<float>(__builtin_log2(sum))) * kLn2;
}

template <typename A, typename B>
void attend_as(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, float* parts, char* scratch) {
  const int from = call.group_start[task.kv_head], group = call.group_start[task.kv_head + 1] - from;
  const int rows = task.count * group, dim = call.dim, wide = rounded_up(dim, 16);
  const int depth = rounded_up(dim, 2), last = task.position + task.count - 1;
  const Room room(scratch, rows, dim);
  TileReader<B> tile(call, room, task.row, task.kv_head);
  A* query = reinterpret_cast<A*>(room.query);
  A* shares = reinterpret_cast<A*>(room.shares);
  const int oldest = call.window == 0 || task.position < call.window ? 0 : task.position - call.window + 1;
  const auto first_of = [&](int span) { return span * kSpan < oldest ? oldest / kTile * kTile : span * kSpan; };
  {
    const int first = first_of(task.first_span), there = last + 1 - first;
    tile.begin(first, there < kTile ? there : kTile);
    tile.lead_to(call, next);
  }
  for (int r = 0; r < rows; ++r) {
    const int token = task.first + r / group, head = call.head_order[from + r % group];
    prepare(call, token, call.query, token * call.query_pitch + static_cast<std::size_t>(head) * dim, call.query_norm,
            true, room.x, room.y);
    for (int i = 0; i < wide; i += 16) store16(query + r * wide + i, load<f32x16>(room.x + i));
  }
  for (int span = task.first_span; span < task.last_span; ++span) {
    for (int r = 0; r < rows; ++r) room.most[r] = -kInfinity;
    std::memset(room.lanes, 0, 4 * static_cast<std::size_t>(rows) * W);
    std::memset(room.acc, 0, 4 * static_cast<std::size_t>(rows) * wide);
    int first = first_of(span);
    const int end = last + 1 < (span + 1) * kSpan ? last + 1 : (span + 1) * kSpan;
    for (; first < end; first += kTile) {
      const int there = end - first < kTile ? end - first : kTile;
      const int behind = last + 1 - first - kTile;
      tile.read(first, there, behind < 0 ? 0 : behind < kTile ? behind : kTile);
      for (int r = 0; r < rows; r += kMaxRows) {
        const int n = rows - r < kMaxRows ? rows - r : kMaxRows;
        const int highest = task.position + (r + n - 1) / group - first;
        const int lowest = call.window == 0 ? 0 : task.position + r / group - call.window + 1 - first;
        if (highest < 0 || lowest >= kTile) continue;
        const int count = highest + 1 < there ? highest + 1 : there;
        const int groups = (count + 15) / 16;
        const bool ask = r == 0;
        for (int c = 0; c < groups; c += kMaxColumns)
          products<A, B>.scores[n - 1][(groups - c < kMaxColumns ? groups - c : kMaxColumns) - 1](
              query + static_cast<std::size_t>(r) * wide, wide, tile.keys + c, (ask ? tile.next_keys : tile.keys) + c,
              depth, room.scores + c * 16);
        float before[kMaxRows];
        int low[kMaxRows], high[kMaxRows];
        for (int i = 0; i < n; ++i) {
          high[i] = task.position + (r + i) / group - first;
          low[i] = call.window == 0 ? 0 : high[i] - call.window + 1;
        }
        soften(call, room, n, groups, low, high, room.most + r, room.lanes + r * W, shares, before);
        for (int c = 0; c < wide / 16; c += kMaxColumns)
          products<A, B>.mixes[n - 1][(wide / 16 - c < kMaxColumns ? wide / 16 - c : kMaxColumns) - 1](
              shares, tile.values, ask ? tile.next_values : tile.values, tile.value_pitch, c * 16, count, before,
              room.acc + static_cast<std::size_t>(r) * wide + c * 16, wide);
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* acc = room.acc + static_cast<std::size_t>(r) * wide;
      const float total = sum_of(load<vf>(room.lanes + r * W));
      if (parts != nullptr) {
        float* to = parts + (static_cast<std::size_t>(span - task.first_span) * rows + r) * (16 + wide);
        to[0] = room.most[r];
        to[1] = total;
        std::memcpy(to + 16, acc, 4 * static_cast<std::size_t>(wide));
      } else if (span == task.first_span) {
        room.total_most[r] = room.most[r];
        room.total_sum[r] = total;
        if (task.last_span - task.first_span > 1)
          std::memcpy(room.total + static_cast<std::size_t>(r) * wide, acc, 4 * static_cast<std::size_t>(wide));
      } else {
        join(room.total_most[r], room.total_sum[r], room.total + static_cast<std::size_t>(r) * wide, room.most[r], total,
             acc, wide);
      }
    }
  }
  if (parts != nullptr) return;
  const float* result = task.last_span - task.first_span > 1 ? room.total : room.acc;
  for (int r = 0; r < rows; ++r)
    finish(call, task.first + r / group, call.head_order[from + r % group], room.total_most[r], room.total_sum[r],
           result + static_cast<std::size_t>(r) * wide);
}

void attend(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, float* parts,
            char* scratch) {
  if (task.writes) write(call, task.first, task.count, task.kv_head, task.kv_head + 1, scratch);
  if (call.cache_type == CacheType::f32) return attend_as<float, float>(call, task, next, parts, scratch);
#if defined(__AVX512BF16__)
  if (call.type == 1) return attend_as<bf16, bf16>(call, task, next, parts, scratch);
#endif
  attend_as<float, bf16>(call, task, next, parts, scratch);
}

void merge(const AttentionCall& call, const AttentionTask& task, int spans, const float* parts, char* scratch) {
  const int from = call.group_start[task.kv_head], group = call.group_start[task.kv_head + 1] - from;
  const int rows = task.count * group, wide = rounded_up(call.dim, 16);
  float* out = reinterpret_cast<float*>(scratch);
  for (int r = 0; r < rows; ++r) {
    const float* part = parts + static_cast<std::size_t>(r) * (16 + wide);
    float most = part[0], total = part[1];
    std::memcpy(out, part + 16, 4 * static_cast<std::size_t>(wide));
    for (int span = 1; span < spans; ++span) {
      part += static_cast<std::size_t>(rows) * (16 + wide);
      join(most, total, out, part[0], part[1], part + 16, wide);
    }
    finish(call, task.first + r / group, call.head_order[from + r % group], most, total, out);
  }
}

std::size_t scratch_bytes(int rows, int dim) { return Room(nullptr, rows, dim).bytes; }

}  // namespace

const Attention attention = {scratch_bytes, write, attend, merge};

}  // namespace phalanx::PHALANX_ISA
