#include "exchange.hpp"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "spin.hpp"

namespace phalanx {
namespace {

constexpr std::int64_t kSpinNs = 30000;    // ranks that have equal shares are about as far as each other
constexpr std::int64_t kYieldNs = 300000;  // then others may need the core; after that, whoever calls waits

}  // namespace

Exchange::Exchange(int rank, int size, Address words, Address round, int line, std::vector<std::int64_t> sleeping,
                   std::vector<int> bells, Address slots, std::int64_t slot_bytes, std::int64_t most_bytes,
                   std::int64_t piece_rows, std::int64_t sums, std::int64_t gathers, bool spins)
    : rank_(rank), size_(size), words_(at_address<std::int64_t>(words)), round_(at_address<std::int64_t>(round)),
      line_(line), sleeping_(std::move(sleeping)), bells_(std::move(bells)), slots_(slots), slot_bytes_(slot_bytes),
      most_bytes_(most_bytes), piece_rows_(piece_rows), sums_(sums), gathers_(gathers), spins_(spins), parts_(size) {}

void Exchange::begin(const void* part, std::int64_t bytes, std::int64_t what) {
  const std::int64_t round = ++*round_, parity = round & 1;
  said_ = what;
  std::memcpy(at_address<char>(slots_) + (parity * size_ + rank_) * slot_bytes_, part, bytes);
  std::int64_t* mine = words_ + rank_ * line_;
  __atomic_store_n(mine + 1 + parity, said_, __ATOMIC_RELAXED);
  __atomic_store_n(mine, round, __ATOMIC_SEQ_CST);
  // Whoever goes to sleep says so and looks at the flag again: one of the two sees what the other wrote.
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !__atomic_load_n(words_ + sleeping_[r], __ATOMIC_RELAXED)) continue;
    const std::uint64_t one = 1;
    if (write(bells_[r], &one, sizeof one) < 0) continue;  // it looks by itself, a little later
  }
}

bool Exchange::arrived() const {
  for (int r = 0; r < size_; ++r)
    if (__atomic_load_n(words_ + r * line_, __ATOMIC_ACQUIRE) < *round_) return false;
  return true;
}

bool Exchange::done() const {
  if (!arrived()) {
    const std::int64_t begin = now_ns();
    while (spins_ && !arrived() && now_ns() < begin + kSpinNs)
      for (int i = 0; i < 16; ++i) relax();
    while (!arrived()) {
      if (now_ns() > begin + kYieldNs) return false;
      sched_yield();
    }
  }
  for (int r = 0; r < size_; ++r)
    if (__atomic_load_n(words_ + r * line_ + 1 + (*round_ & 1), __ATOMIC_RELAXED) != said_) return false;
  return true;
}

const std::vector<Address>& Exchange::parts() {
  for (int r = 0; r < size_; ++r) parts_[r] = slots_ + ((*round_ & 1) * size_ + r) * slot_bytes_;
  return parts_;
}

}  // namespace phalanx
