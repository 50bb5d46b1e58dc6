// The rows of a step: what a plan changes in the table of requests (phalanx/worker/request_table.py), and what the model
// gets of it. Here is what happens in nearly every step; a plan that does not fit is left to the twin, which knows what
// is wrong with it.
#include "request_rows.hpp"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace phalanx {
namespace {

template <typename T>
std::vector<T> numbers(const nb::bytes& data) {
  std::vector<T> values(data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), data.c_str(), values.size() * sizeof(T));
  return values;
}

nb::bytes column(const nb::tuple& rows, std::size_t i) { return nb::cast<nb::bytes>(rows[i]); }

}  // namespace

RowTokens::RowTokens(const nb::bytes& row_data, const nb::bytes& token_data, std::size_t of)
    : tokens(numbers<std::int32_t>(token_data)), starts(of + 1) {
  const auto rows = numbers<std::uint16_t>(row_data);
  fit = row_data.size() == 2 * tokens.size() && token_data.size() == 4 * tokens.size() &&
        std::is_sorted(rows.begin(), rows.end()) && (rows.empty() || rows.back() < of);
  if (!fit) return;
  for (const std::size_t row : rows) ++starts[row + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
}

bool RowTokens::within(std::int64_t vocab) const {
  return std::all_of(tokens.begin(), tokens.end(), [&](std::int32_t token) { return token >= 0 && token < vocab; });
}

void RowTokens::copy(std::size_t row, std::int32_t* to) const {
  std::copy(tokens.begin() + starts[row], tokens.begin() + starts[row + 1], to);
}

PlanRows::PlanRows(const nb::tuple& rows)
    : slots(numbers<std::uint16_t>(column(rows, 0))), counts(numbers<std::uint16_t>(column(rows, 1))),
      last(numbers<std::int32_t>(column(rows, 2))), block_rows(numbers<std::uint16_t>(column(rows, 3))),
      blocks(numbers<std::int32_t>(column(rows, 4))), accepted(column(rows, 5), column(rows, 6), slots.size()),
      proposed(column(rows, 7), column(rows, 8), slots.size()) {
  fit_ = column(rows, 0).size() == 2 * size() && column(rows, 1).size() == 2 * size() &&
         column(rows, 2).size() == 4 * size() && column(rows, 3).size() == 2 * block_rows.size() &&
         column(rows, 4).size() == 4 * block_rows.size() && accepted.fit && proposed.fit;
}

bool PlanRows::can_advance(const RequestTable& table) const {
  if (!fit_ || !accepted.within(table.vocab) || !proposed.within(table.vocab)) return false;
  const std::size_t rows = slots.size();
  std::vector<std::int32_t> extra(rows);
  for (std::size_t i = 0; i < block_rows.size(); ++i) {
    if (block_rows[i] >= rows || blocks[i] < 0 || blocks[i] >= table.pool_blocks) return false;
    ++extra[block_rows[i]];
  }
  const std::int64_t longest = std::min(table.max_length, table.token_width);
  std::vector<bool> seen(table.slots);
  for (std::size_t i = 0; i < rows; ++i) {
    const std::size_t slot = slots[i];
    if (slot >= seen.size() || seen[slot] || !table.active[slot] || table.penalised[slot]) return false;
    seen[slot] = true;
    const std::int64_t had = table.num_blocks[slot], have = had + extra[i];
    std::int64_t length = table.length[slot], computed = table.computed[slot];
    if (const std::int64_t more = accepted.count(i); more > 0) {
      if (computed != length || length + more > std::min(longest, had * table.block_size)) return false;
      computed = length += more;
    }
    if (last[i] != kNoToken) {
      const std::int32_t token = last[i] == kOnDevice ? table.sampled[slot] : last[i];
      if (token < 0 || token >= table.vocab || ++length > longest) return false;
    }
    computed += counts[i];
    if (counts[i] < 1 || computed > length || have * table.block_size < computed || have > table.block_width) return false;
    if (const std::int64_t more = proposed.count(i); more > 0)
      if (computed != length || length + more > std::min(longest, have * table.block_size)) return false;
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
    std::int32_t* tokens = table.tokens + slot * table.token_width;
    accepted.copy(i, tokens + table.length[slot]);
    table.length[slot] += accepted.count(i);
    table.computed[slot] += accepted.count(i);
    if (last[i] != kNoToken) {
      tokens[table.length[slot]++] = last[i] == kOnDevice ? table.sampled[slot] : last[i];
      table.sampled[slot] = kNoToken;
    }
    proposed.copy(i, tokens + table.length[slot]);
  }
}

namespace {

// False, and nothing is changed, when the twin has to do it.
bool advance_rows(Address table_address, const nb::tuple& plan_rows, Address slots_out, Address starts_out,
                  Address counts_out, Address proposed_out, Address samples_out) {
  const RequestTable& table = *at_address<RequestTable>(table_address);
  const PlanRows rows(plan_rows);
  if (!rows.can_advance(table)) return false;
  rows.advance(table);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t slot = rows.slots[i];
    at_address<std::int64_t>(slots_out)[i] = static_cast<std::int64_t>(slot);
    at_address<std::int64_t>(starts_out)[i] = table.computed[slot];
    at_address<std::int64_t>(counts_out)[i] = rows.counts[i] + rows.proposed.count(i);
    at_address<std::int64_t>(proposed_out)[i] = rows.proposed.count(i);
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
