// What choosing tokens does with a row of logits: passes over the whole vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.hpp"

namespace phalanx {

struct Best {
  float value;  // NaN when there is one in the row
  int column;   // the first of equal ones
};

// What a race compares: (word + 0.5) · exp((best - x) · inverse), see phalanx/sampling/race.py.
struct Race {
  float best, inverse;          // inverse temperature
  std::uint32_t low, high;      // halves of the row's key
  std::uint32_t first;          // token of column 0
};

struct Sampling {
  Best (*best)(const float* x, int count);
  // Sum of exp((x - best) · inverse).
  double (*sum_exp)(const float* x, int count, float best, float inverse);
  // Columns of the numbers above `floor`, rising, into `columns`, which has room for `count`; how many they are.
  int (*above)(const float* x, int count, float floor, int* columns);
  // How many numbers are above `own`, or equal to it and in a column before `column`.
  std::int64_t (*before)(const float* x, int count, float own, int column);
  // Columns from `from` on, up to the end or until `room` are found, of tokens whose time is at most `bound`; where to
  // go on is left in `from`.
  int (*contenders)(const float* x, int count, const Race& race, float bound, int* from, int* columns, int room);
};

PHALANX_DECLARE_TABLES(Sampling, sampling)

}  // namespace phalanx
