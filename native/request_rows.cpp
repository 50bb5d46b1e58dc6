// The rows of a step: what a plan changes in the table of requests (phalanx/worker/request_table.py), and what the model
// gets of it. Here is what happens in nearly every step; a plan that does not fit is left to the twin, which knows what
// is wrong with it.
#include "request_rows.hpp"

#include <nanobind/stl/pair.h>

#include <cstring>

namespace phalanx {
namespace {

template <typename T>
std::vector<T> numbers(const nb::bytes& data) {
  std::vector<T> values(data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), data.c_str(), values.size() * sizeof(T));
  return values;
}

}  // namespace

PlanRows::PlanRows(const nb::bytes& slot_data, const nb::bytes& count_data, const nb::bytes& last_data,
                   const nb::bytes& block_row_data, const nb::bytes& block_data)
    : slots(numbers<std::uint16_t>(slot_data)), counts(numbers<std::uint16_t>(count_data)),
      block_rows(numbers<std::uint16_t>(block_row_data)), last(numbers<std::int32_t>(last_data)),
      blocks(numbers<std::int32_t>(block_data)) {
  const std::size_t rows = slots.size();
  fit_ = slot_data.size() == 2 * rows && count_data.size() == 2 * rows && last_data.size() == 4 * rows &&
         block_row_data.size() == 2 * block_rows.size() && block_data.size() == 4 * block_rows.size();
}

bool PlanRows::can_advance(const RequestTable& table) const {
  if (!fit_) return false;
  const std::size_t rows = slots.size();
  std::vector<std::int32_t> extra(rows);
  for (std::size_t i = 0; i < block_rows.size(); ++i) {
    if (block_rows[i] >= rows || blocks[i] < 0 || blocks[i] >= table.pool_blocks) return false;
    ++extra[block_rows[i]];
  }
  std::vector<bool> seen(table.slots);
  for (std::size_t i = 0; i < rows; ++i) {
    const std::size_t slot = slots[i];
    if (slot >= seen.size() || seen[slot] || !table.active[slot] || table.penalised[slot]) return false;
    seen[slot] = true;
    std::int64_t length = table.length[slot];
    if (last[i] != kNoToken) {
      const std::int32_t token = last[i] == kOnDevice ? table.sampled[slot] : last[i];
      if (token < 0 || token >= table.vocab || ++length > table.max_length || length > table.token_width) return false;
    }
    const std::int64_t needed = table.computed[slot] + counts[i], have = table.num_blocks[slot] + extra[i];
    if (counts[i] < 1 || needed > length || have * table.block_size < needed || have > table.block_width) return false;
  }
  return true;
}

void PlanRows::advance(const RequestTable& table) const {
  for (std::size_t i = 0; i < block_rows.size(); ++i) {
    const std::size_t slot = slots[block_rows[i]];
    table.blocks[slot * table.block_width + table.num_blocks[slot]++] = blocks[i];
  }
  for (std::size_t i = 0; i < size(); ++i) {
    const std::size_t slot = slots[i];
    if (last[i] == kNoToken) continue;
    table.tokens[slot * table.token_width + table.length[slot]++] = last[i] == kOnDevice ? table.sampled[slot] : last[i];
    table.sampled[slot] = kNoToken;
  }
}

namespace {

// False, and nothing is changed, when the twin has to do it.
bool advance_rows(Address table_address, const nb::bytes& slots, const nb::bytes& counts, const nb::bytes& last,
                  const nb::bytes& block_rows, const nb::bytes& blocks, Address slots_out, Address starts_out,
                  Address counts_out, Address samples_out) {
  const RequestTable& table = *at_address<RequestTable>(table_address);
  const PlanRows rows(slots, counts, last, block_rows, blocks);
  if (!rows.can_advance(table)) return false;
  rows.advance(table);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t slot = rows.slots[i];
    at_address<std::int64_t>(slots_out)[i] = static_cast<std::int64_t>(slot);
    at_address<std::int64_t>(starts_out)[i] = table.computed[slot];
    at_address<std::int64_t>(counts_out)[i] = rows.counts[i];
    at_address<bool>(samples_out)[i] = table.computed[slot] + rows.counts[i] == table.length[slot];
  }
  return true;
}

// Tokens of all rows together, and blocks of the row that has most of them.
std::pair<std::int64_t, std::int64_t> size_rows(Address starts, Address counts, std::size_t rows,
                                                std::int64_t block_size) {
  std::int64_t total = 0, width = 1;
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int64_t count = at_address<std::int64_t>(counts)[i];
    const std::int64_t used = (at_address<std::int64_t>(starts)[i] + count + block_size - 1) / block_size;
    total += count;
    if (used > width) width = used;
  }
  return {total, width};
}

void gather_rows(Address table_address, Address slots, Address starts, Address counts, std::size_t rows,
                 std::int64_t width, Address tokens, Address positions, Address query_start, Address contexts,
                 Address prompts, Address blocks, Address places) {
  const RequestTable& table = *at_address<RequestTable>(table_address);
  std::int64_t at = 0;
  at_address<std::int64_t>(query_start)[0] = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int64_t slot = at_address<std::int64_t>(slots)[i], start = at_address<std::int64_t>(starts)[i];
    const std::int64_t end = start + at_address<std::int64_t>(counts)[i];
    const std::int64_t used = (end + table.block_size - 1) / table.block_size;
    const std::int32_t* own = table.blocks + slot * table.block_width;
    std::int32_t* row = at_address<std::int32_t>(blocks) + i * width;
    for (std::int64_t j = 0; j < width; ++j) row[j] = j < used ? own[j] : 0;
    for (std::int64_t position = start; position < end; ++position, ++at) {
      at_address<std::int64_t>(tokens)[at] = table.tokens[slot * table.token_width + position];
      at_address<std::int64_t>(positions)[at] = position;
      at_address<std::int64_t>(places)[at] =
          own[position / table.block_size] * table.block_size + position % table.block_size;
    }
    at_address<std::int64_t>(query_start)[i + 1] = at;
    at_address<std::int64_t>(contexts)[i] = end;
    at_address<std::int64_t>(prompts)[i] = table.prompt[slot];
  }
}

}  // namespace

void bind_request_rows(nb::module_& m) {
  m.def("advance_rows", &advance_rows);
  m.def("size_rows", &size_rows);
  m.def("gather_rows", &gather_rows);
}

}  // namespace phalanx
