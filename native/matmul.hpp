// Products with packed weights: y[T, N] = x[T, K] · W[N, K]ᵀ + bias, in float32 and bfloat16.
//
// A packed matrix is blocks of 32 outputs one after the other, the last one as wide as is left over. A block of n
// outputs is [K][n] in float32 and [K / 2][n][2] in bfloat16: pairs of neighbours along K, and behind them, where K is
// odd, the last [n]. Nothing is padded: N · K elements, in an order that depends on N, K and the type alone.
//
// Each output of each row is summed along K by one accumulator, in the same order and by the same instructions
// whatever other rows there are: float32 by fused multiply and add; bfloat16 so too after widening, or by products of
// pairs where the processor has them (which take denormal numbers for zero).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.hpp"

namespace phalanx {

constexpr int kBlockOutputs = 32;

// Memory to bring near while multiplying: two lines of the cache for each k (bfloat16: each pair), then `step` bytes on.
struct Fetch {
  const char* at;
  int step;
};

struct Matmul {
  int tile_rows;         // of x, multiplied at once at most
  bool multiplies_pairs;  // a bfloat16 tile is [K / 2][rows][2]; otherwise, as a float32 one, float [K][rows]

  // `rows` rows of x, `stride` elements apart, as a tile; an odd K's last pair is filled up with zero.
  void (*tile_f32)(const float* x, std::size_t stride, int rows, int depth, void* tile);
  void (*tile_bf16)(const std::uint16_t* x, std::size_t stride, int rows, int depth, void* tile);
  // sums [rows][32] = tile · block of `width` outputs, or += where `carry`. Both may begin at a later, even k.
  void (*multiply_f32)(const float* block, int width, const void* tile, int rows, int depth, float* sums, bool carry,
                       Fetch fetch);
  void (*multiply_bf16)(const std::uint16_t* block, int width, const void* tile, int rows, int depth, float* sums,
                        bool carry, Fetch fetch);
  // y[row][0 … width - 1] = sums + bias (unless null), rounded once.
  void (*finish_f32)(const float* sums, int rows, int width, const float* bias, float* y, std::size_t stride);
  void (*finish_bf16)(const float* sums, int rows, int width, const std::uint16_t* bias, std::uint16_t* y,
                      std::size_t stride);
  void (*finish_wide)(const float* sums, int rows, int width, const std::uint16_t* bias, float* y, std::size_t stride);
};

PHALANX_DECLARE_TABLES(Matmul, matmul)

}  // namespace phalanx
