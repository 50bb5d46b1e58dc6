// Products of many rows with quantised weights by AMX, which multiplies 16 rows with a group at once, a block at a time.
// The integers are exact and what is done with them is the same as in kernels/block_matmul.cpp: so is the result, to the
// bit. Products of bfloat16 are not computed so: AMX adds their pairs in another order than other rows' are added in.
#if defined(__AMX_INT8__)
#include "block_kernels.hpp"

namespace phalanx::PHALANX_ISA {
namespace {

constexpr int kRows = 16;

struct alignas(64) TileConfig {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

// Tile 0 has the sums of 16 rows and 16 outputs, tile 1 so many activations of each row, tile 2 four weights of each
// output in a row, as a packed matrix has them.
template <int kInputs>
constexpr TileConfig kTiles = {1, 0, {}, {64, kInputs, 64}, {kRows, kRows, kInputs / 4}};

PHALANX_INLINE void multiply_tile(const std::int8_t* activations, std::size_t step, const std::uint8_t* weights,
                                  std::int32_t* sums) {
  // What was written is in memory before it is loaded: GCC's loads of tiles do not say that they read.
  asm volatile("" : : "r"(activations), "r"(weights) : "memory");
  _tile_zero(0);
  _tile_loadd(1, activations, step);
  _tile_loadd(2, weights, 64);
  _tile_dpbsud(0, 1, 2);
  _tile_stored(0, sums, 64);
}

template <BlockKind kKind>
void tile(const BlockProduct& product, const BlockPart& part, const GroupShape& shape, std::size_t group,
          std::size_t row) {
  using K = Kind<kKind>;
  const std::size_t blocks = product.rows.blocks;
  const std::uint8_t* packed = reinterpret_cast<const std::uint8_t*>(part.packed) + group * shape.bytes;
  const std::int8_t* q = product.rows.q + row * blocks * kBlock;
  const float* scale = product.rows.scale + row * blocks;
  const float* scaled_sum = product.rows.scaled_sum + row * blocks;
  const std::int32_t* offset = product.rows.offset + row * blocks * 2;
  alignas(64) std::uint8_t bytes[8 * 64];
  alignas(64) std::int32_t dots[2][kRows * kLanes];
  floats total[kRows] = {};
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::uint8_t* weights = packed + b * 64 * K::bits;
    if constexpr (K::bits < 8) {
      PHALANX_UNROLL
      for (int j = 0; j < 4; ++j) {
        quads low, high;
        K::unpack(weights, j, low, high);
        store(bytes + 64 * j, low);
        store(bytes + 64 * (4 + j), high);
      }
      weights = bytes;
    }
    multiply_tile(q + b * kBlock, blocks * kBlock, weights, dots[0]);
    if constexpr (K::halves) multiply_tile(q + b * kBlock + 16, blocks * kBlock, weights + 4 * 64, dots[1]);
    const Scales scales = scales_of<kKind>(packed, shape, b, 0);
    PHALANX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Dots sums = less_zeros<kKind>(offset + (r * blocks + b) * 2);
      sums.dot += load<ints>(dots[0] + r * kLanes);
      if constexpr (K::halves) sums.second += load<ints>(dots[1] + r * kLanes);
      total[r] = add_block<kKind>(total[r], sums, scales, scale[r * blocks + b], scaled_sum[r * blocks + b]);
    }
  }
  finish<kKind, kRows>(product, part, shape, group, row, 0, total);
}

template <BlockKind kKind>
void multiply_kind(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
                   std::size_t row_begin, std::size_t row_end) {
  const GroupShape shape(Kind<kKind>::layout, product.rows.blocks, part.phase, static_cast<int>(part.shift));
  _tile_loadconfig(&kTiles<Kind<kKind>::halves ? 16 : 32>);
  for (std::size_t group = group_begin; group < group_end; ++group)
    for (std::size_t row = row_begin; row < row_end; row += kRows) tile<kKind>(product, part, shape, group, row);
  _tile_release();  // threads that have no tiles are switched faster
}

void multiply_tiles(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
                    std::size_t row_begin, std::size_t row_end) {
  switch (static_cast<BlockKind>(part.kind)) {
#define PHALANX_CASE(kind) \
  case BlockKind::kind: return multiply_kind<BlockKind::kind>(product, part, group_begin, group_end, row_begin, row_end);
    PHALANX_EACH_KIND(PHALANX_CASE)
#undef PHALANX_CASE
    default: break;
  }
}

}  // namespace

void multiply(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
              std::size_t row_begin, std::size_t row_end, const AheadPart& ahead) {
  const std::size_t whole = row_begin + (row_end - row_begin) / kRows * kRows;
  if (whole > row_begin) multiply_tiles(product, part, group_begin, group_end, row_begin, whole);
  if (whole < row_end) avx512bf16::block_matmul.multiply(product, part, group_begin, group_end, whole, row_end, ahead);
}

}  // namespace phalanx::PHALANX_ISA
#endif
