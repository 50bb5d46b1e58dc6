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

// A plan's rows (phalanx.step.Rows), unpacked.
class PlanRows {
 public:
  PlanRows(const nb::bytes& slots, const nb::bytes& counts, const nb::bytes& last, const nb::bytes& block_rows,
           const nb::bytes& blocks);
  std::size_t size() const { return slots.size(); }
  // Whether they fit together, and the table has what they take; nothing is changed.
  bool can_advance(const RequestTable& table) const;
  // Append their tokens and blocks.
  void advance(const RequestTable& table) const;

  std::vector<std::uint16_t> slots, counts, block_rows;
  std::vector<std::int32_t> last, blocks;

 private:
  bool fit_;
};

}  // namespace phalanx
