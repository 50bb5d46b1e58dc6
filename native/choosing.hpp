// How a row's token is chosen: what phalanx/sampling/sampler.py says, for rows that nothing constrains.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

struct LogitsRow {
  const float* logits;
  int vocab;
  std::uint32_t first;  // token of column 0
  double temperature, top_p, min_p;
  std::int64_t top_k;
  std::uint64_t key;
};

// The first of the largest where the temperature is 0, else one that is drawn; -1 where the largest logit, which is left
// in `best`, is not a finite number.
std::int64_t choose_token(const LogitsRow& row, float& best);
// Which of `tokens`, with these logits, wins; of equal ones the lowest. -1 where all are minus infinity. What logits `row`
// has does not matter.
std::int64_t winner_of(const LogitsRow& row, const std::int32_t* tokens, const float* logits, std::size_t count);
// What a row draws with: phalanx/sampling/random.py.
std::uint64_t row_key(std::uint64_t seed, std::uint64_t choice, std::uint64_t position, std::uint64_t purpose);

}  // namespace phalanx
