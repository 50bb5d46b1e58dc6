// Products with quantised weights, which stay as small integers, and activations rounded to int8 on the way.
//
// A packed matrix [outputs, inputs] is one buffer, 64-byte aligned, whose layout depends on its kind and its size alone:
// groups of 16 outputs one after the other, each `group_bytes` long and padded to 64 bytes, the last with zero rows. In
// a group, with `blocks` = inputs / 32 rounded up:
//
//   integers  per block 64 · bits bytes. Lane o of 16 holds in its four bytes the same four neighbouring inputs. Eight
//             bits: eight registers of 64 bytes for inputs 0-3, 4-7, … 28-31. Fewer: four registers whose low nibbles are
//             inputs 4j … 4j + 3 and whose high nibbles are 16 + 4j …; then, for five bits, one register whose bit r of
//             each byte is the fifth bit of register r of eight; for six bits, two whose bit pairs 2·(r % 4) are the
//             fifth and sixth bits of register r.
//   scales    per block 16 float16, and 16 float16 minima where the kind has them. K-quants: 16 bytes of scales and 16
//             of minima (Q6_K: twice 16 signed scales, of 16 inputs each); then for each eight blocks, counted from
//             `phase`, 16 float16 factors of the scales and 16 of the minima. INT8: 16 float32, one for each output.
//             INT4: for each 2^shift blocks, counted from `phase`, 16 float32 scales and 16 bytes of zeros.
//
// A weight is scale · (integer - zero), or scale · integer + minimum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ahead.hpp"
#include "cpu.hpp"

namespace phalanx {

enum class BlockKind : int { q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, int8, int4, count };

struct BlockLayout {
  int bits;
  int zero;         // what is subtracted from the integer; 0 where it comes with the scales
  int scale_bytes;  // of a block and 16 outputs
  int super_bytes;  // of 2^shift blocks and 16 outputs
  int tail_bytes;   // of 16 outputs
};

constexpr BlockLayout kBlockLayouts[] = {
    {4, 8, 32, 0, 0},    {4, 0, 64, 0, 0},  {5, 16, 32, 0, 0},  {5, 0, 64, 0, 0},  {8, 128, 32, 0, 0},
    {4, 0, 32, 64, 0},   {5, 0, 32, 64, 0}, {6, 32, 32, 32, 0}, {8, 128, 0, 0, 64}, {4, 0, 0, 80, 0},
};

constexpr int kBlock = 32;   // inputs that share an activation's scale
constexpr int kLanes = 16;   // outputs of a group

// Where the parts of a group are, in bytes from its beginning.
struct GroupShape {
  std::size_t scales, supers, tail, bytes, phase;
  int shift;
  GroupShape(const BlockLayout& layout, std::size_t blocks, std::size_t phase, int shift) : phase(phase), shift(shift) {
    scales = blocks * 64 * layout.bits;
    supers = scales + blocks * layout.scale_bytes;
    const std::size_t last = blocks == 0 && phase == 0 ? 0 : ((blocks + phase - 1) >> shift) + 1;
    tail = supers + last * layout.super_bytes;
    bytes = (tail + layout.tail_bytes + 63) / 64 * 64;
  }
  // Where what several blocks share is for this one.
  std::size_t super(const BlockLayout& layout, std::size_t block) const {
    return supers + ((block + phase) >> shift) * layout.super_bytes;
  }
};

enum class Number : int { f32 = 0, bf16 = 1, f16 = 2 };

// One of the matrices that are multiplied with the same activations. Python fills arrays of these.
struct BlockPart {
  std::int64_t packed;   // address
  std::int64_t kind;
  std::int64_t outputs;
  std::int64_t column;   // of y, where its outputs go
  std::int64_t phase;
  std::int64_t shift;
};

// Rows of activations as integers: x ≈ scale · q for each block of 32.
struct BlockRows {
  const std::int8_t* q;        // [rows, 32 · blocks]
  const float* scale;          // [rows, blocks]
  const float* scaled_sum;     // [rows, blocks] scale · sum of q
  const std::int32_t* offset;  // [rows, 2 · blocks] -8 · sum of q, for each 16
  std::size_t blocks;
};

struct BlockProduct {
  BlockRows rows;
  void* y;
  std::size_t stride;  // of y, in numbers
  Number type;         // of y
  const void* bias;    // [outputs of all parts], null for none
  Number bias_type;
};

struct BlockMatmul {
  // One row of `columns` numbers, of which the first goes to place `lead` of the first block; the rest is zero.
  void (*quantize)(const void* x, Number type, std::size_t columns, std::size_t lead, std::size_t blocks,
                   std::int8_t* q, float* scale, float* scaled_sum, std::int32_t* offset);
  // Rows row_begin to row_end of y, for the outputs of some groups of one part. `ahead` is fetched meanwhile, as much of
  // it as there is time for.
  void (*multiply)(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
                   std::size_t row_begin, std::size_t row_end, const AheadPart& ahead);
  // `count` numbers in another type.
  void (*round)(const float* x, Number type, void* y, std::size_t count);
};

PHALANX_DECLARE_TABLES(BlockMatmul, block_matmul)

namespace amx {
// As `multiply` of AVX-512, to the bit.
void multiply(const BlockProduct& product, const BlockPart& part, std::size_t group_begin, std::size_t group_end,
              std::size_t row_begin, std::size_t row_end, const AheadPart& ahead);
}  // namespace amx

// Activations rounded to 8 bits, in memory that is kept from one product to the next. Whoever makes the rows may round them
// too, while they are in its cache.
class RoundedRows {
 public:
  RoundedRows() = default;
  RoundedRows(const RoundedRows&) = delete;
  ~RoundedRows();
  // Room for so many rows of `inputs` numbers, behind `lead` zeros.
  void make_room(std::size_t rows, std::size_t inputs, std::size_t lead, Number type);
  // Rounds rows first to last of x, `stride` numbers apart; others may be rounded by other threads meanwhile.
  void round(const void* x, std::size_t stride, std::size_t first, std::size_t last) const;
  BlockRows rows() const { return {q_, scale_, scaled_sum_, offset_, blocks_}; }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_ = 0, inputs_ = 0, lead_ = 0, blocks_ = 0;
  Number type_ = Number::f32;
  std::int8_t* q_ = nullptr;
  float *scale_ = nullptr, *scaled_sum_ = nullptr;
  std::int32_t* offset_ = nullptr;
};

// The calling thread's.
RoundedRows& rounded_rows();

}  // namespace phalanx
