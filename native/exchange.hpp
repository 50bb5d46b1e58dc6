// A round of exchange between the ranks of one node: what is added up or told lies in memory that they share.
//
// The memory, its words and what they mean are phalanx/distributed/transports/shared_memory.py's, which takes part in
// rounds by the same words, waits where a short wait did not suffice, and finds out who is missing.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings.hpp"

namespace phalanx {

class Exchange {
 public:
  // `words` int64 flags, a rank's `line` apart; `sleeping` the index of each rank's word that says that it sleeps,
  // `bells` the eventfds that wake it; `round` the number of the last round. Rank r's slot of a round of parity p is at
  // `slots` + (p · size + r) · `slot_bytes`. Sums of more than `most_bytes` of all ranks together are made `piece_rows`
  // rows at a time, or more narrow ones. `sums` and `gathers` are what a rank says it does, less the bytes. `spins`:
  // whether each rank has a core of its own.
  Exchange(int rank, int size, Address words, Address round, int line, std::vector<std::int64_t> sleeping,
           std::vector<int> bells, Address slots, std::int64_t slot_bytes, std::int64_t most_bytes,
           std::int64_t piece_rows, std::int64_t sums, std::int64_t gathers, bool spins);
  Exchange(const Exchange&) = delete;

  // Whether so many bytes of each rank take one round.
  bool takes(std::int64_t bytes) const { return bytes > 0 && bytes * size_ <= most_bytes_; }
  // How many of the rows of a larger sum go in one round; 0: it takes more than rounds of whole rows.
  std::int64_t piece(std::int64_t rows, std::int64_t row_bytes) const {
    const std::int64_t fit = slot_bytes_ / row_bytes, small = most_bytes_ / size_ / row_bytes;
    const std::int64_t wanted = small > piece_rows_ ? small : piece_rows_, piece = fit < wanted ? fit : wanted;
    return piece < rows ? piece : 0;
  }
  // This rank's part, into its slot; the round has begun. Of a sum, or of a gather of as many int32 from each rank.
  void begin_sum(const void* part, std::int64_t bytes) { begin(part, bytes, sums_ | bytes); }
  void begin_gather(const void* part, std::int64_t bytes) { begin(part, bytes, gathers_ | bytes * size_); }
  // Whether all ranks' parts are there and of one kind; waits a moment for them.
  bool done() const;
  // All ranks' parts of this round.
  const std::vector<Address>& parts();

 private:
  void begin(const void* part, std::int64_t bytes, std::int64_t what);
  bool arrived() const;

  int rank_, size_;
  std::int64_t *words_, *round_;
  int line_;
  std::vector<std::int64_t> sleeping_;
  std::vector<int> bells_;
  Address slots_;
  std::int64_t slot_bytes_, most_bytes_, piece_rows_, sums_, gathers_, said_ = 0;
  bool spins_;
  std::vector<Address> parts_;
};

}  // namespace phalanx
