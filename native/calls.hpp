// Kernels over whole tensors, shared among the team's threads: shown to Python one by one, and played by a tape.
// Numbers of a tensor follow each other; `type` is a Type of pointwise.hpp unless said otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bindings.hpp"
#include "block_matmul.hpp"

namespace phalanx {

// Three of them leave y rounded to 8 bits too where `rounded` is not null; there is room for it then.

// x [rows, width] += delta (unless null), y = norm(x) * weight + bias (unless null). y may be x. `types` as in
// Pointwise::norm.
void norm(Address x, Address delta, Address weight, Address bias, Address y, std::size_t rows, int width, float eps,
          int layer, int types, RoundedRows* rounded = nullptr);
// y = f(x), [rows, width].
void activate(Address x, Address y, std::size_t rows, std::size_t width, int function, int type,
              RoundedRows* rounded = nullptr);
// y [rows, width] = f(gate) * up, x [rows, 2 * width] holds both side by side.
void activate_gated(Address x, Address y, std::size_t rows, std::size_t width, int function, int type,
                    RoundedRows* rounded = nullptr);
// y = the sum of the pieces, in their order, all [rows, width]; rounded once. y may be a piece.
void add_up(const Address* pieces, int count, Address y, std::size_t rows, std::size_t width, int type);
// y [rows, width] += bias [width].
void add_bias(Address y, Address bias, std::size_t rows, std::size_t width, int type);

// y [rows, outputs] = x [rows, depth] · W + bias (unless null) of a packed matrix; rows of x and y begin `stride` numbers
// apart. `wide` writes float32 from bfloat16.
void multiply_packed(Address x, std::size_t x_stride, Address w, Address bias, Address y, std::size_t y_stride,
                     std::size_t rows, int depth, int outputs, int type, bool wide);
// The same by `count` BlockParts, whose outputs stand side by side; `lead` zeros are put before each row of x. Types are
// Numbers of block_matmul.hpp. Takes of `ahead`, unless it is null, what there is time to fetch.
void multiply_blocks(Address x, std::size_t x_stride, std::size_t rows, std::size_t inputs, std::size_t lead, int x_type,
                     Address parts, std::size_t count, Address y, std::size_t y_stride, int y_type, Address bias,
                     int bias_type, Ahead* ahead);
// The same of activations that are rounded already.
void multiply_rounded(const RoundedRows& x, std::size_t rows, Address parts, std::size_t count, Address y,
                      std::size_t y_stride, int y_type, Address bias, int bias_type, Ahead* ahead);

// Rows `ids` - `start` of a packed matrix, or of BlockParts one below the other: y [count, inputs], zeros for those that it
// does not have. Types are Numbers.
void look_up_packed_rows(Address packed, Address ids, std::int64_t start, Address y, std::size_t count,
                         std::size_t outputs, std::size_t depth, int type);
void look_up_block_rows(Address ids, std::size_t count, std::int64_t start, std::size_t inputs, std::size_t lead,
                        Address parts, std::size_t part_count, Address y, int type);

}  // namespace phalanx
