#include "sampling.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "bindings.hpp"
#include "choosing.hpp"
#include "team.hpp"

namespace phalanx {
namespace {

constexpr std::int64_t kSearched = 1024;  // of more candidates, those that can win are searched first
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Row = LogitsRow;

std::uint32_t mix(std::uint32_t word) {
  word ^= word >> 16;
  word *= 0x7feb352du;
  word ^= word >> 15;
  word *= 0x846ca68bu;
  return word ^ (word >> 16);
}

std::uint64_t mix(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

std::uint32_t word_of(const Row& row, std::uint32_t token) {
  return mix(mix(token ^ static_cast<std::uint32_t>(row.key)) + static_cast<std::uint32_t>(row.key >> 32));
}

std::uint32_t token_of(const Row& row, int column) { return row.first + static_cast<std::uint32_t>(column); }

// Candidates sort by falling logit, ties by column: as rising integers.
std::uint64_t sort_key(float logit, int column) {
  std::int32_t bits;
  logit += 0.0f;  // the two zeros are equal
  std::memcpy(&bits, &logit, sizeof bits);
  bits ^= (bits >> 31) & 0x7fffffff;
  return static_cast<std::uint64_t>(~static_cast<std::uint32_t>(bits) ^ 0x80000000u) << 32 |
         static_cast<std::uint32_t>(column);
}
int column_of(std::uint64_t key) { return static_cast<int>(key & 0x7fffffff); }

float single(double temperature) { return static_cast<float>(std::min<double>(temperature, FLT_MAX)); }

float inverse(double temperature) { return 1.0f / single(temperature); }  // never zero

// What decides a race: phalanx/sampling/race.py.
double sum_of(const Row& row, std::uint32_t token, float logit, float best) {
  const double exponential = -std::log1p((word_of(row, token) + 0.5) * -0x1p-32);
  return (static_cast<double>(logit) - best) / row.temperature - std::log(exponential);
}

// Of columns in any order, the one with the largest sum; of equal ones the lowest.
template <typename Column>
int winner(const Row& row, float best, std::size_t count, Column column_at) {
  double most = -kInfinity;
  int won = -1;
  for (std::size_t i = 0; i < count; ++i) {
    const int column = column_at(i);
    if (row.logits[column] == -kInfinity) continue;
    const double sum = sum_of(row, token_of(row, column), row.logits[column], best);
    if (sum > most || (sum == most && column < won)) most = sum, won = column;
  }
  return won;
}

double bound_of(const Row& row, int column, float best) {
  constexpr double kSlack = 1.0001;
  const float distance = (best - row.logits[column]) / single(row.temperature);
  return -std::log1p((word_of(row, token_of(row, column)) + 0.5) / -0x1p32) * std::exp(static_cast<double>(distance)) * 0x1p32 *
         kSlack;
}

// Among the candidates up to `last` in order.
int race(const Row& row, Best best, std::uint64_t last) {
  const Race search = {best.value, inverse(row.temperature), static_cast<std::uint32_t>(row.key),
                       static_cast<std::uint32_t>(row.key >> 32), row.first};
  // The bound falls as better ones are found; whoever was within it stays in the list, which costs little.
  double bound = bound_of(row, best.column, best.value);
  std::vector<int> list;
  int columns[64];
  for (int from = 0; from < row.vocab;) {
    const int found = sampling().contenders(row.logits, row.vocab, search, static_cast<float>(bound * 1.000001), &from,
                                            columns, from ? 64 : 16);
    for (int i = 0; i < found; ++i) {
      if (sort_key(row.logits[columns[i]], columns[i]) > last) continue;
      bound = std::min(bound, bound_of(row, columns[i], best.value));
      list.push_back(columns[i]);
    }
  }
  return winner(row, best.value, list.size(), [&](std::size_t i) { return list[i]; });
}

// Of keys in the order of their columns; stable, so that equal logits stay in it.
void radix_sort(std::vector<std::uint64_t>& keys) {
  constexpr int kBits = 11;
  std::vector<std::uint64_t> other(keys.size());
  for (int shift = 32; shift < 64; shift += kBits) {
    std::size_t starts[(1 << kBits) + 1] = {};
    const auto digit = [shift](std::uint64_t key) { return (key >> shift) & ((1 << kBits) - 1); };
    for (const std::uint64_t key : keys) ++starts[digit(key) + 1];
    for (int i = 0; i < 1 << kBits; ++i) starts[i + 1] += starts[i];
    for (const std::uint64_t key : keys) other[starts[digit(key)]++] = key;
    keys.swap(other);
  }
}

// The first `most` candidates in order.
void first_candidates(const float* logits, int vocab, std::size_t most, std::vector<std::uint64_t>& keys) {
  constexpr int kPart = 1024;
  constexpr std::size_t kSelected = 4096;
  keys.clear();
  if (most > kSelected) {
    for (int i = 0; i < vocab; ++i) keys.push_back(sort_key(logits[i], i));
    radix_sort(keys);
    keys.resize(most);
    return;
  }
  int columns[kPart];
  bool full = false;
  float floor = 0;
  for (int start = 0; start < vocab; start += kPart) {
    const int part = std::min(kPart, vocab - start);
    if (!full) {
      for (int i = 0; i < part; ++i) keys.push_back(sort_key(logits[start + i], start + i));
    } else {
      const int found = sampling().above(logits + start, part, floor, columns);
      for (int i = 0; i < found; ++i)
        keys.push_back(sort_key(logits[start + columns[i]], start + columns[i]));
    }
    // Of what equals the last one kept only earlier columns go before it, and those were seen.
    if (keys.size() >= 2 * most || (!full && keys.size() >= most)) {
      std::nth_element(keys.begin(), keys.begin() + (most - 1), keys.end());
      keys.resize(most);
      floor = logits[column_of(keys.back())];
      full = true;
    }
  }
  if (keys.size() > most) {
    std::nth_element(keys.begin(), keys.begin() + (most - 1), keys.end());
    keys.resize(most);
  }
  std::sort(keys.begin(), keys.end());
}

// How many of the first `count` candidates, whose logits are in order, the row may draw; -1 when it takes more of them to
// know. `whole`: there are no more. The arithmetic of `kept_counts` in phalanx/sampling/truncation.py.
template <typename Logit>
std::int64_t kept_count(const Row& row, double log_sum, std::int64_t count, bool whole, Logit logit_at) {
  const float scale = single(row.temperature), best = logit_at(0);
  std::vector<double> values(count), mass(count);
  double total = 0;
  std::int64_t finite = 0, likely = 0;
  const double floor = row.min_p > 0 ? std::log(row.min_p) : -kInfinity;
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = (logit_at(i) - best) / scale;
    mass[i] = total += std::exp(values[i] - log_sum);
    finite += values[i] > -kInfinity;
    likely += values[i] >= values[0] + floor;
  }
  const bool complete = finite < count || whole;
  std::int64_t kept = std::min(likely, finite);
  if (row.top_k > 0) kept = std::min(kept, row.top_k);
  const bool known = complete || kept < count || (row.top_k > 0 && row.top_k <= count);
  const bool unlimited = row.top_k == 0 && row.min_p == 0 && !complete;
  const double last = mass[kept - 1], all = unlimited ? 1.0 : last;
  const bool narrowed = row.top_p < 1;
  if (!known && !(unlimited && narrowed && last >= row.top_p * all)) return -1;
  if (!narrowed) return kept;
  std::int64_t nucleus = 0;
  for (std::int64_t i = 0; i < count; ++i) nucleus += (i ? mass[i - 1] : 0.0) < row.top_p * all;
  return std::min(nucleus, kept);
}

int draw(const Row& row, Best best) {
  const bool narrows = (row.top_k > 0 && row.top_k < row.vocab) || row.top_p < 1 || row.min_p > 0;
  if (!narrows) return race(row, best, ~std::uint64_t{0});
  double log_sum = 0;
  if (row.top_p < 1)
    log_sum = std::log(sampling().sum_exp(row.logits, row.vocab, best.value, inverse(row.temperature)));
  std::vector<std::uint64_t> keys;
  int few = 128;
  if (row.top_k > 0 && row.top_k < few) few = static_cast<int>(row.top_k);
  for (int count : {few, 2048, row.vocab}) {
    if (count > row.vocab) continue;
    first_candidates(row.logits, row.vocab, count, keys);
    const std::int64_t kept = kept_count(row, log_sum, count, count == row.vocab,
                                         [&](std::size_t i) { return row.logits[column_of(keys[i])]; });
    if (kept > kSearched) return race(row, best, keys[kept - 1]);
    if (kept > 0) return winner(row, best.value, kept, [&](std::size_t i) { return column_of(keys[i]); });
  }
  return -1;
}

}  // namespace

std::int64_t choose_token(const LogitsRow& row, float& best_value) {
  const Best best = sampling().best(row.logits, row.vocab);
  best_value = best.value;
  if (!std::isfinite(best.value)) return -1;
  const int column = row.temperature > 0 ? draw(row, best) : best.column;
  return column < 0 ? -1 : static_cast<std::int64_t>(column) + row.first;
}

std::int64_t winner_of(const LogitsRow& row, const std::int32_t* tokens, const float* logits, std::size_t count) {
  const float best = *std::max_element(logits, logits + count);
  double most = -kInfinity;
  std::int64_t won = -1;
  for (std::size_t i = 0; i < count; ++i) {
    if (logits[i] == -kInfinity) continue;
    const double sum = sum_of(row, static_cast<std::uint32_t>(tokens[i]), logits[i], best);
    if (sum > most || (sum == most && tokens[i] < won)) most = sum, won = tokens[i];
  }
  return won;
}

std::uint64_t row_key(std::uint64_t seed, std::uint64_t choice, std::uint64_t position, std::uint64_t purpose) {
  constexpr std::uint64_t kGamma = 0x9e3779b97f4a7c15u;
  std::uint64_t state = mix(seed + kGamma);
  for (const std::uint64_t word : {choice, position, purpose}) state = mix((state ^ word) + kGamma);
  return state;
}

namespace {

// As phalanx.kernels.sampling.Draws; rows draw nothing where `temperature` is null.
struct Draws {
  Address temperature, top_k, top_p, min_p, keys;

  Row of(std::size_t i, const float* logits, int vocab, std::uint32_t first) const {
    Row row = {logits, vocab, first, 0, 1, 0, 0, 0};
    if (temperature) {
      row.temperature = at_address<double>(temperature)[i];
      row.top_p = at_address<double>(top_p)[i];
      row.min_p = at_address<double>(min_p)[i];
      row.top_k = at_address<std::int64_t>(top_k)[i];
      row.key = at_address<std::uint64_t>(keys)[i];
    }
    return row;
  }
};

// As choose_token, of each row.
void choose_tokens(Address logits, std::size_t rows, int vocab, std::uint32_t first, Address temperature, Address top_k,
                   Address top_p, Address min_p, Address keys, Address tokens, Address bests) {
  const Draws draws{temperature, top_k, top_p, min_p, keys};
  parallel_for(rows, [&](std::size_t i) {
    const Row row = draws.of(i, at_address<float>(logits) + i * vocab, vocab, first);
    at_address<std::int64_t>(tokens)[i] = choose_token(row, at_address<float>(bests)[i]);
  });
}

// What the others need to know of a part of the vocabulary, from token `first` on, to draw from all of it. Of each row
// the log of the sum of exp((logit - best) / temperature), minus infinity where `best` is; tokens and logits of the first
// `most` candidates, [rows, most], or -1 and NaN behind those that there are.
void tell_candidates(Address logits, std::size_t rows, int vocab, std::uint32_t first, Address bests, Address temperature,
                     std::size_t most, Address sums, Address tokens, Address values) {
  const std::size_t have = std::min<std::size_t>(most, vocab);
  parallel_for(rows, [&](std::size_t i) {
    const float* x = at_address<float>(logits) + i * vocab;
    const float best = at_address<float>(bests)[i];
    const double sum =
        best == -kInfinity ? 0 : sampling().sum_exp(x, vocab, best, inverse(at_address<double>(temperature)[i]));
    at_address<float>(sums)[i] = static_cast<float>(std::log(sum));
    std::vector<std::uint64_t> keys;
    first_candidates(x, vocab, have, keys);
    for (std::size_t j = 0; j < most; ++j) {
      const int column = j < have ? column_of(keys[j]) : -1;
      at_address<std::int32_t>(tokens)[i * most + j] = j < have ? static_cast<std::int32_t>(first) + column : -1;
      at_address<float>(values)[i * most + j] = j < have ? x[column] : std::numeric_limits<float>::quiet_NaN();
    }
  });
}

// A token of each row from what parts of the vocabulary tell of it, from the lowest tokens on: [parts, rows, told]. Of
// these the first `most` in order are looked at, which are all that there are if `whole`. -1 where it takes more to know.
void choose_told(Address tokens, Address values, std::size_t parts, std::size_t rows, std::size_t told, std::size_t most,
                 bool whole, Address log_sums, Address temperature, Address top_k, Address top_p, Address min_p,
                 Address keys, Address chosen) {
  const Draws draws{temperature, top_k, top_p, min_p, keys};
  parallel_for(rows, [&](std::size_t i) {
    std::vector<std::size_t> heads(parts);
    for (std::size_t part = 0; part < parts; ++part) heads[part] = (part * rows + i) * told;
    std::vector<std::int32_t> own_tokens;
    std::vector<float> logits;
    while (logits.size() < most) {
      std::size_t next = parts;
      float largest = 0;
      for (std::size_t part = 0; part < parts; ++part) {
        if (heads[part] == (part * rows + i + 1) * told) continue;
        const float value = at_address<float>(values)[heads[part]];
        // Of equal ones those of the lower part come first; NaN is behind all that a part has.
        if (!std::isnan(value) && (next == parts || value > largest)) next = part, largest = value;
      }
      if (next == parts) break;
      own_tokens.push_back(at_address<std::int32_t>(tokens)[heads[next]++]);
      logits.push_back(largest);
    }
    const Row row = draws.of(i, nullptr, 0, 0);
    const std::int64_t kept = kept_count(row, at_address<double>(log_sums)[i], static_cast<std::int64_t>(logits.size()),
                                         whole, [&](std::size_t at) { return logits[at]; });
    at_address<std::int64_t>(chosen)[i] = kept > 0 ? winner_of(row, own_tokens.data(), logits.data(), kept) : -1;
  });
}

// Columns [rows, most] of the first candidates of each row.
void candidates(Address logits, std::size_t rows, int vocab, std::size_t most, Address columns) {
  parallel_for(rows, [&](std::size_t i) {
    std::vector<std::uint64_t> keys;
    first_candidates(at_address<float>(logits) + i * vocab, vocab, most, keys);
    std::int64_t* out = at_address<std::int64_t>(columns) + i * most;
    for (std::size_t j = 0; j < most; ++j) out[j] = column_of(keys[j]);
  });
}

// Of each row: log-probability and rank (from 1) of the token in `columns`, ids and log-probabilities of the `most`
// likely ones.
void logprobs(Address logits, std::size_t rows, int vocab, Address columns, std::size_t most, Address own,
              Address ranks, Address top_ids, Address top) {
  parallel_for(rows, [&](std::size_t i) {
    const float* x = at_address<float>(logits) + i * vocab;
    const int column = static_cast<int>(at_address<std::int64_t>(columns)[i]);
    const float best = sampling().best(x, vocab).value;
    const float log_sum = static_cast<float>(std::log(sampling().sum_exp(x, vocab, best, 1.0f)));
    at_address<float>(own)[i] = (x[column] - best) - log_sum;
    at_address<std::int64_t>(ranks)[i] = 1 + sampling().before(x, vocab, x[column], column);
    if (!most) return;
    std::vector<std::uint64_t> keys;
    first_candidates(x, vocab, most, keys);
    for (std::size_t j = 0; j < most; ++j) {
      at_address<std::int32_t>(top_ids)[i * most + j] = column_of(keys[j]);
      at_address<float>(top)[i * most + j] = (x[column_of(keys[j])] - best) - log_sum;
    }
  });
}

void row_keys(Address seeds, Address choices, Address positions, std::uint64_t purpose, std::size_t rows,
              Address keys) {
  for (std::size_t i = 0; i < rows; ++i)
    at_address<std::uint64_t>(keys)[i] =
        row_key(at_address<std::uint64_t>(seeds)[i], at_address<std::uint64_t>(choices)[i],
                at_address<std::uint64_t>(positions)[i], purpose);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("choose_tokens", &choose_tokens, nb::call_guard<nb::gil_scoped_release>());
  m.def("candidates", &candidates, nb::call_guard<nb::gil_scoped_release>());
  m.def("tell_candidates", &tell_candidates, nb::call_guard<nb::gil_scoped_release>());
  m.def("choose_told", &choose_told, nb::call_guard<nb::gil_scoped_release>());
  m.def("logprobs", &logprobs, nb::call_guard<nb::gil_scoped_release>());
  m.def("row_keys", &row_keys);
}

}  // namespace phalanx
