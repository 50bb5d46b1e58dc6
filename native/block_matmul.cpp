#include "block_matmul.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "calls.hpp"
#include "team.hpp"

namespace phalanx {
namespace {

// -- packing and looking up -------------------------------------------------------------------------------------------

float half_to_float(std::uint16_t bits) {
  const std::uint32_t number = (bits & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &number, sizeof value);
  value *= 0x1p112f;  // denormals too
  std::uint32_t whole;
  std::memcpy(&whole, &value, sizeof whole);
  whole |= (bits & 0x8000u) << 16;
  if ((bits & 0x7c00u) == 0x7c00u) whole |= 0xffu << 23;
  std::memcpy(&value, &whole, sizeof value);
  return value;
}

std::uint16_t half_at(const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

// Bytes of a block in a file, and the inputs it holds.
struct FileBlock {
  int bytes, inputs;
};
constexpr FileBlock kFileBlocks[] = {{18, 32},   {20, 32},   {22, 32},   {24, 32}, {34, 32},
                                     {144, 256}, {176, 256}, {210, 256}, {32, 32}, {32, 32}};

// 32 inputs of one output as a file has them: the integers less no zero, and what belongs beside them.
struct Block {
  std::uint8_t integers[kBlock];
  std::uint16_t scale = 0, minimum = 0;            // float16: of the block, or of its eight
  std::uint8_t sub_scale[2] = {}, sub_minimum = 0;
};

// The six bits of scale and of minimum `i` of eight, in 12 bytes.
void six_bits(const std::uint8_t* p, int i, std::uint8_t& scale, std::uint8_t& minimum) {
  if (i < 4) {
    scale = p[i] & 63;
    minimum = p[i + 4] & 63;
  } else {
    scale = (p[i + 4] & 15) | ((p[i - 4] >> 6) << 4);
    minimum = (p[i + 4] >> 4) | ((p[i] >> 6) << 4);
  }
}

void nibbles(const std::uint8_t* from, std::uint8_t* to) {
  for (int i = 0; i < 16; ++i) {
    to[i] = from[i] & 15;
    to[i + 16] = from[i] >> 4;
  }
}

// Block `sub` of the eight in a K-quant's; of others there is one. ggml-quants.c is where the layouts come from.
void read_block(BlockKind kind, const std::uint8_t* p, int sub, Block& block) {
  std::uint8_t* to = block.integers;
  switch (kind) {
    case BlockKind::q4_0:
      block.scale = half_at(p);
      nibbles(p + 2, to);
      break;
    case BlockKind::q4_1:
      block.scale = half_at(p);
      block.minimum = half_at(p + 2);
      nibbles(p + 4, to);
      break;
    case BlockKind::q5_0:
    case BlockKind::q5_1: {
      const int head = kind == BlockKind::q5_0 ? 2 : 4;
      block.scale = half_at(p);
      if (kind == BlockKind::q5_1) block.minimum = half_at(p + 2);
      std::uint32_t fifth;
      std::memcpy(&fifth, p + head, sizeof fifth);
      nibbles(p + head + 4, to);
      for (int i = 0; i < kBlock; ++i) to[i] |= ((fifth >> i) & 1) << 4;
      break;
    }
    case BlockKind::q8_0:
      block.scale = half_at(p);
      for (int i = 0; i < kBlock; ++i) to[i] = p[2 + i] ^ 0x80;
      break;
    case BlockKind::q4_k:
    case BlockKind::q5_k: {
      block.scale = half_at(p);
      block.minimum = half_at(p + 2);
      six_bits(p + 4, sub, block.sub_scale[0], block.sub_minimum);
      const std::uint8_t* q = p + (kind == BlockKind::q4_k ? 16 : 48) + sub / 2 * 32;
      const int shift = sub % 2 * 4;
      for (int i = 0; i < kBlock; ++i) to[i] = (q[i] >> shift) & 15;
      if (kind == BlockKind::q5_k)
        for (int i = 0; i < kBlock; ++i) to[i] |= ((p[16 + i] >> sub) & 1) << 4;
      break;
    }
    case BlockKind::q6_k: {
      block.scale = half_at(p + 208);
      block.sub_scale[0] = p[192 + 2 * sub];
      block.sub_scale[1] = p[192 + 2 * sub + 1];
      const std::uint8_t* low = p + sub / 4 * 64 + sub % 2 * 32;
      const std::uint8_t* high = p + 128 + sub / 4 * 32;
      const int shift = sub % 4 / 2 * 4, pair = sub % 4 * 2;
      for (int i = 0; i < kBlock; ++i) to[i] = ((low[i] >> shift) & 15) | (((high[i] >> pair) & 3) << 4);
      break;
    }
    default:  // a byte for each integer
      for (int i = 0; i < kBlock; ++i) to[i] = kind == BlockKind::int8 ? p[i] ^ 0x80 : p[i] & 15;
  }
}

// Block `index` of lane `lane` into its group.
void write_block(BlockKind kind, const Block& block, std::uint8_t* group, const GroupShape& shape, std::size_t index,
                 std::size_t lane) {
  const BlockLayout& layout = kBlockLayouts[static_cast<int>(kind)];
  std::uint8_t* at = group + index * 64 * layout.bits + lane * 4;
  const std::uint8_t* q = block.integers;
  if (layout.bits == 8) {
    for (int r = 0; r < 8; ++r) std::memcpy(at + 64 * r, q + 4 * r, 4);
  } else {
    std::uint8_t both[16];
    for (int i = 0; i < 16; ++i) both[i] = (q[i] & 15) | (q[i + 16] << 4);
    for (int r = 0; r < 4; ++r) std::memcpy(at + 64 * r, both + 4 * r, 4);
  }
  if (layout.bits == 5) {
    std::uint8_t high[4] = {};
    for (int r = 0; r < 8; ++r)
      for (int i = 0; i < 4; ++i) high[i] |= (q[4 * r + i] >> 4) << r;
    std::memcpy(at + 256, high, 4);
  }
  if (layout.bits == 6) {
    std::uint8_t high[8] = {};
    for (int r = 0; r < 8; ++r)
      for (int i = 0; i < 4; ++i) high[r / 4 * 4 + i] |= (q[4 * r + i] >> 4) << (r % 4 * 2);
    std::memcpy(at + 256, high, 4);
    std::memcpy(at + 320, high + 4, 4);
  }
  if (layout.scale_bytes == 0) return;  // they come beside the blocks
  std::uint8_t* scales = group + shape.scales + index * layout.scale_bytes;
  if (layout.super_bytes > 0) {
    scales[lane] = block.sub_scale[0];
    scales[16 + lane] = kind == BlockKind::q6_k ? block.sub_scale[1] : block.sub_minimum;
    scales = group + shape.super(layout, index);
  }
  std::memcpy(scales + 2 * lane, &block.scale, 2);
  if (layout.zero == 0) std::memcpy(scales + 32 + 2 * lane, &block.minimum, 2);
}

std::size_t packed_bytes(int kind, std::size_t outputs, std::size_t blocks, std::size_t phase, int shift) {
  const GroupShape shape(kBlockLayouts[kind], blocks, phase, shift);
  return (outputs + kLanes - 1) / kLanes * shape.bytes;
}

// `raw` holds rows of whole file blocks, `row_bytes` apart, of which the first `phase` times 32 inputs are left out.
// INT8 and INT4 rows are `inputs` bytes each; float32 `own_scales` and, for INT4, bytes `own_zeros` are [outputs, as many
// as an output has].
void pack(int kind_number, Address raw, std::size_t row_bytes, std::size_t outputs, std::size_t inputs,
          std::size_t phase, int shift, Address own_scales, Address own_zeros, Address packed) {
  const auto kind = static_cast<BlockKind>(kind_number);
  const FileBlock& file = kFileBlocks[kind_number];
  const BlockLayout& layout = kBlockLayouts[kind_number];
  const std::size_t blocks = (inputs + kBlock - 1) / kBlock, subs = file.inputs / kBlock;
  const bool bytes = kind == BlockKind::int8 || kind == BlockKind::int4;
  const GroupShape shape(layout, blocks, phase, shift);
  const std::size_t sets = kind == BlockKind::int4 ? (shape.tail - shape.supers) / layout.super_bytes : 1;
  parallel_for((outputs + kLanes - 1) / kLanes, [&](std::size_t g) {
    std::uint8_t* group = at_address<std::uint8_t>(packed) + g * shape.bytes;
    std::memset(group, 0, shape.bytes);
    const std::size_t lanes = outputs - g * kLanes < kLanes ? outputs - g * kLanes : kLanes;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const std::uint8_t* row = at_address<std::uint8_t>(raw) + (g * kLanes + lane) * row_bytes;
      for (std::size_t b = 0; b < blocks; ++b) {
        Block block;
        if (bytes && (b + 1) * kBlock > inputs) {
          std::uint8_t held[kBlock] = {};
          std::memcpy(held, row + b * kBlock, inputs - b * kBlock);
          read_block(kind, held, 0, block);
        } else {
          const std::size_t at = bytes ? b : b + phase;
          read_block(kind, row + at / subs * file.bytes, static_cast<int>(at % subs), block);
        }
        write_block(kind, block, group, shape, b, lane);
      }
      if (!bytes) continue;
      const std::uint8_t* scale = at_address<std::uint8_t>(own_scales) + (g * kLanes + lane) * sets * 4;
      if (kind == BlockKind::int8) {
        std::memcpy(group + shape.tail + 4 * lane, scale, 4);
        continue;
      }
      const std::uint8_t* zero = at_address<std::uint8_t>(own_zeros) + (g * kLanes + lane) * sets;
      for (std::size_t s = 0; s < sets; ++s) {
        std::uint8_t* to = group + shape.supers + s * layout.super_bytes;
        std::memcpy(to + 4 * lane, scale + 4 * s, 4);
        to[64 + lane] = zero[s];
      }
    }
  });
}

// Rows of a packed matrix as float32, the products and sums one by one, as ggml's reference has them.
void unpack_row(int kind_number, const std::uint8_t* packed, std::size_t output, std::size_t inputs, std::size_t lead,
                std::size_t phase, int shift, float* y) {
  const auto kind = static_cast<BlockKind>(kind_number);
  const BlockLayout& layout = kBlockLayouts[kind_number];
  const std::size_t blocks = (lead + inputs + kBlock - 1) / kBlock, lane = output % kLanes;
  const GroupShape shape(layout, blocks, phase, shift);
  const std::uint8_t* group = packed + output / kLanes * shape.bytes;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::uint8_t* at = group + b * 64 * layout.bits + lane * 4;
    const std::uint8_t* scales = group + shape.scales + b * layout.scale_bytes;
    const std::uint8_t* supers = group + shape.super(layout, b);
    float scale[2], minimum = 0.0f;
    int zero = layout.zero;
    if (kind == BlockKind::int4) {
      std::memcpy(scale, supers + 4 * lane, 4);
      scale[1] = scale[0];
      zero = supers[64 + lane];
    } else if (layout.super_bytes > 0) {
      const float factor = half_to_float(half_at(supers + 2 * lane));
      if (kind == BlockKind::q6_k) {
        scale[0] = factor * static_cast<float>(static_cast<std::int8_t>(scales[lane]));
        scale[1] = factor * static_cast<float>(static_cast<std::int8_t>(scales[16 + lane]));
      } else {
        scale[0] = scale[1] = factor * scales[lane];
        minimum = -(half_to_float(half_at(supers + 32 + 2 * lane)) * scales[16 + lane]);
      }
    } else if (layout.tail_bytes > 0) {
      std::memcpy(scale, group + shape.tail + 4 * lane, 4);
      scale[1] = scale[0];
    } else {
      scale[0] = scale[1] = half_to_float(half_at(scales + 2 * lane));
      if (layout.zero == 0) minimum = half_to_float(half_at(scales + 32 + 2 * lane));
    }
    for (int i = 0; i < kBlock; ++i) {
      const std::size_t input = b * kBlock + i;
      if (input < lead || input >= lead + inputs) continue;
      const int r = i / 4, byte = i % 4;
      int q;
      if (layout.bits == 8) {
        q = at[64 * r + byte];
      } else {
        q = r < 4 ? at[64 * r + byte] & 15 : at[64 * (r - 4) + byte] >> 4;
        if (layout.bits == 5) q |= ((at[256 + byte] >> r) & 1) << 4;
        if (layout.bits == 6) q |= ((at[256 + r / 4 * 64 + byte] >> (r % 4 * 2)) & 3) << 4;
      }
      const float product = scale[i / 16] * static_cast<float>(q - zero);
      y[input - lead] = layout.zero == 0 && kind != BlockKind::int4 ? product + minimum : product;
    }
  }
}

}  // namespace

void look_up_block_rows(Address ids, std::size_t count, std::int64_t start, std::size_t inputs, std::size_t lead,
                        Address parts, std::size_t part_count, Address y, int type) {
  const BlockPart* part = at_address<const BlockPart>(parts);
  const Number number = static_cast<Number>(type);
  const std::size_t bytes = inputs * (number == Number::f32 ? 4 : 2);
  if (bytes == 0) return;
  parallel_for((count + 7) / 8, [&](std::size_t task) {
    thread_local std::vector<float> held;
    held.resize(inputs);
    for (std::size_t i = task * 8; i < count && i < task * 8 + 8; ++i) {
      const std::int64_t row = at_address<const std::int64_t>(ids)[i] - start;
      char* to = at_address<char>(y) + i * bytes;
      std::size_t p = 0;
      while (p < part_count && !(part[p].column <= row && row < part[p].column + part[p].outputs)) ++p;
      if (p == part_count) {
        std::memset(to, 0, bytes);
        continue;
      }
      unpack_row(static_cast<int>(part[p].kind), reinterpret_cast<const std::uint8_t*>(part[p].packed),
                 row - part[p].column, inputs, lead, part[p].phase, static_cast<int>(part[p].shift), held.data());
      block_matmul().round(held.data(), number, to, inputs);
    }
  });
}

namespace {

// -- products ---------------------------------------------------------------------------------------------------------

// A task waits for its first weights; where there are many rows, what matters more is that threads end together.
constexpr std::size_t kTasksPerThread = 2, kManyRows = 16, kTasksOfManyRows = 6;
constexpr std::size_t kRowsPerTask = 128;  // whose activations stay in the second cache

constexpr std::size_t kRowsPerRounding = 4;

}  // namespace

RoundedRows::~RoundedRows() { std::free(memory_); }

void RoundedRows::make_room(std::size_t rows, std::size_t inputs, std::size_t lead, Number type) {
  const std::size_t blocks = (lead + inputs + kBlock - 1) / kBlock;
  const std::size_t bytes = (rows * blocks * (kBlock + 16) + 127) / 64 * 64;
  if (bytes > bytes_) {
    std::free(memory_);
    memory_ = std::aligned_alloc(64, bytes);
    bytes_ = memory_ == nullptr ? 0 : bytes;
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  inputs_ = inputs;
  lead_ = lead;
  type_ = type;
  q_ = static_cast<std::int8_t*>(memory_);
  scale_ = reinterpret_cast<float*>(q_ + rows * blocks * kBlock);
  scaled_sum_ = scale_ + rows * blocks;
  offset_ = reinterpret_cast<std::int32_t*>(scaled_sum_ + rows * blocks);
  blocks_ = blocks;
}

void RoundedRows::round(const void* x, std::size_t stride, std::size_t first, std::size_t last) const {
  const std::size_t bytes = stride * (type_ == Number::f32 ? 4 : 2);
  for (std::size_t row = first; row < last; ++row)
    block_matmul().quantize(static_cast<const char*>(x) + row * bytes, type_, inputs_, lead_, blocks_,
                            q_ + row * blocks_ * kBlock, scale_ + row * blocks_, scaled_sum_ + row * blocks_,
                            offset_ + row * blocks_ * 2);
}

RoundedRows& rounded_rows() {
  thread_local RoundedRows rows;
  return rows;
}

void multiply_blocks(Address x, std::size_t step_x, std::size_t rows, std::size_t inputs, std::size_t lead, int x_type,
                     Address parts, std::size_t count, Address y, std::size_t stride, int y_type, Address bias,
                     int bias_type, Ahead* ahead) {
  if (rows == 0) return;
  RoundedRows& rounded = rounded_rows();
  rounded.make_room(rows, inputs, lead, static_cast<Number>(x_type));
  parallel_for((rows + kRowsPerRounding - 1) / kRowsPerRounding, [&](std::size_t task) {
    const std::size_t first = task * kRowsPerRounding;
    rounded.round(at_address<void>(x), step_x, first, std::min(first + kRowsPerRounding, rows));
  });
  multiply_rounded(rounded, rows, parts, count, y, stride, y_type, bias, bias_type, ahead);
}

void multiply_rounded(const RoundedRows& rounded, std::size_t rows, Address parts, std::size_t count, Address y,
                      std::size_t stride, int y_type, Address bias, int bias_type, Ahead* ahead) {
  if (rows == 0) return;
  auto multiply = block_matmul().multiply;
#if defined(PHALANX_AMX)
  if (active() == Isa::amx) multiply = amx::multiply;
#endif
  const BlockProduct product{rounded.rows(), at_address<void>(y), stride, static_cast<Number>(y_type),
                             at_address<const void>(bias), static_cast<Number>(bias_type)};
  const BlockPart* part = at_address<const BlockPart>(parts);
  std::size_t groups = 0;
  for (std::size_t p = 0; p < count; ++p) groups += (part[p].outputs + kLanes - 1) / kLanes;
  const std::size_t pieces = (rows + kRowsPerTask - 1) / kRowsPerTask;
  std::size_t step = groups;
  if (team_size() > 1) {
    step = groups / ((rows > kManyRows ? kTasksOfManyRows : kTasksPerThread) * team_size()) / 2 * 2;
    if (step < 2) step = 2;
  }
  std::size_t tasks = 0;
  for (std::size_t p = 0; p < count; ++p) {
    const std::size_t own = (part[p].outputs + kLanes - 1) / kLanes;
    tasks += (own + step - 1) / step;
  }
  // There is time for a fetch with each block of a pair of groups and four rows, but for the first four of a piece.
  const std::size_t fours = rows / pieces / 4, blocks = product.rows.blocks;
  const std::size_t fetches = ahead == nullptr || fours < 2 ? 0 : (fours - 1) * blocks;  // of a pair of groups
  const std::size_t taken = fetches == 0 ? 0 : ahead->taken;
  if (fetches > 0) ahead->taken = std::min(ahead->fetches, taken + pieces * groups / 2 * fetches);
  parallel_for(tasks * pieces, [&](std::size_t index) {
    const std::size_t piece = index / tasks;
    std::size_t task = index % tasks, before = piece * groups;
    for (std::size_t p = 0; p < count; ++p) {
      const std::size_t own = (part[p].outputs + kLanes - 1) / kLanes, own_tasks = (own + step - 1) / step;
      if (task >= own_tasks) {
        task -= own_tasks;
        before += own;
        continue;
      }
      const std::size_t begin = task * step, end = begin + step < own ? begin + step : own;
      const std::size_t row = piece * kRowsPerTask, last = row + kRowsPerTask < rows ? row + kRowsPerTask : rows;
      AheadPart fetched{ahead, taken + (before + begin) / 2 * fetches, 0};
      if (fetches > 0 && fetched.first < ahead->taken)
        fetched.count = std::min((end - begin) / 2 * fetches, ahead->taken - fetched.first);
      multiply(product, part[p], begin, end, row, last, fetched);
      return;
    }
  });
}

void bind_block_matmul(nb::module_& m) {
  const auto free = nb::call_guard<nb::gil_scoped_release>();
  m.def("block_packed_bytes", &packed_bytes);
  m.def("block_pack", &pack, free);
  m.def("block_unpack", &look_up_block_rows, free);
  m.def("block_matmul", [](Address x, std::size_t x_stride, std::size_t rows, std::size_t inputs, std::size_t lead,
                           int x_type, Address parts, std::size_t count, Address y, std::size_t y_stride, int y_type,
                           Address bias, int bias_type) {
    multiply_blocks(x, x_stride, rows, inputs, lead, x_type, parts, count, y, y_stride, y_type, bias, bias_type, nullptr);
  }, free);
}

}  // namespace phalanx
