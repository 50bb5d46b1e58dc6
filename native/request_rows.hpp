// The rows of a step: what a plan changes in the table of requests (phalanx/worker/request_table.py).
#pragma once

#include <cstdint>
#include <vector>

#include "bindings.hpp"

namespace phalanx {

// As phalanx.kernels.request_rows.TableView lays it out.
struct RequestTable {
  const std::uint8_t *active, *penalised;
  std::int32_t* tokens;
  std::int64_t token_width;
  std::int64_t *length, *prompt, *computed;
  std::int32_t* blocks;
  std::int64_t block_width;
  std::int64_t* num_blocks;
  std::int32_t* sampled;
  std::int64_t slots, max_length, block_size, pool_blocks, vocab;
};
static_assert(sizeof(RequestTable) == 16 * 8, "all entries are 64 bits wide");

constexpr std::int32_t kOnDevice = -1, kNoToken = -2;

// Tokens of some of a plan's rows, row after row.
struct RowTokens {
  RowTokens(const nb::bytes& rows, const nb::bytes& tokens, std::size_t of);
  std::int64_t count(std::size_t row) const { return static_cast<std::int64_t>(starts[row + 1] - starts[row]); }
  bool within(std::int64_t vocab) const;
  // To where those of `row` go.
  void copy(std::size_t row, std::int32_t* to) const;

  std::vector<std::int32_t> tokens;
  std::vector<std::size_t> starts;  // one more than rows
  bool fit;
};

// A plan's rows, unpacked.
class PlanRows {
 public:
  // What phalanx.step.Rows has, in its order.
  explicit PlanRows(const nb::tuple& rows);
  std::size_t size() const { return slots.size(); }
  // Whether they fit together, and the table has what they take; nothing is changed.
  bool can_advance(const RequestTable& table) const;
  // Append their tokens and blocks; those proposed are written behind.
  void advance(const RequestTable& table) const;

  const std::vector<std::uint16_t> slots, counts;
  const std::vector<std::int32_t> last;
  const std::vector<std::uint16_t> block_rows;
  const std::vector<std::int32_t> blocks;
  const RowTokens accepted, proposed;

 private:
  bool fit_;
};

}  // namespace phalanx
