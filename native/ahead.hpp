// What is fetched ahead: keys and values that the next attention reads, by the products before it. A product of many rows
// computes for longer than its weights take to arrive, and attention of single tokens does little but wait for memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

constexpr std::size_t kFetchBytes = 256;  // at once: four lines

// Blocks of a cache: of each the keys and the values, `block_fetches` for either.
struct Ahead {
  const char *key = nullptr, *value = nullptr;
  const std::int32_t* blocks = nullptr;
  std::size_t block_bytes = 0, block_fetches = 0;
  std::size_t fetches = 0, taken = 0;  // of all; what products have taken of them
};

// What of it a task asks for, in fetches.
struct AheadPart {
  const Ahead* of = nullptr;
  std::size_t first = 0, count = 0;
};

}  // namespace phalanx

#if defined(PHALANX_ISA)
#include "vec.hpp"

namespace phalanx::PHALANX_ISA {

class Fetcher {
 public:
  PHALANX_INLINE explicit Fetcher(const AheadPart& part) : of_(part.of), left_(part.count) {
    if (left_ == 0) return;
    turn(part.first / of_->block_fetches);
    at_ += part.first % of_->block_fetches * kFetchBytes;
    left_here_ -= part.first % of_->block_fetches;
  }
  PHALANX_INLINE bool more() const { return left_ > 0; }
  PHALANX_INLINE void next() {
    if (left_ == 0) return;
    for (std::size_t byte = 0; byte < kFetchBytes; byte += 64) __builtin_prefetch(at_ + byte, 0, 2);
    at_ += kFetchBytes;
    --left_;
    if (--left_here_ == 0 && left_ > 0) turn(half_ + 1);
  }

 private:
  // To a block's keys, which are even, or its values.
  PHALANX_INLINE void turn(std::size_t half) {
    half_ = half;
    at_ = (half % 2 ? of_->value : of_->key) + of_->blocks[half / 2] * of_->block_bytes;
    left_here_ = of_->block_fetches;
  }

  const Ahead* of_;
  const char* at_ = nullptr;
  std::size_t left_, half_ = 0, left_here_ = 0;
};

}  // namespace phalanx::PHALANX_ISA
#endif
