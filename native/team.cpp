#include "team.hpp"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "spin.hpp"

namespace phalanx {
namespace {

// Spins until `ready()` or for `spin_ns`; whether it became ready.
template <typename Ready>
bool spin(std::int64_t spin_ns, Ready ready) {
  if (ready()) return true;
  if (spin_ns <= 0) return false;
  const std::int64_t end = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (now_ns() < end);
  return ready();
}

class Team {
 public:
  Team(int size, const std::vector<int>& cores, std::int64_t spin_ns) : spin_ns_(spin_ns) {
    for (int i = 1; i < size; ++i) {
      const int core = static_cast<std::size_t>(i) < cores.size() ? cores[i] : -1;
      threads_.emplace_back([this, core] { work(core); });
    }
  }

  ~Team() {
    ending_.store(true);
    begin(1);
    wake(begin_lock_, begin_);
    for (std::thread& thread : threads_) thread.join();
  }

  // Whoever has no task of the round is not waited for: it may be asleep, or another process may have its core.
  void run(std::size_t count, Task task, void* context) {
    while (count > kMost) task(context, --count);
    task_ = task;
    context_ = context;
    begin(count);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) wake(begin_lock_, begin_);
    expected_ += count - share();
    auto done = [this] { return finished_.load(std::memory_order_seq_cst) == expected_; };
    if (spin(kWaitNs, done)) return;
    std::unique_lock<std::mutex> lock(end_lock_);
    waiting_.store(true, std::memory_order_seq_cst);
    end_.wait(lock, done);
    waiting_.store(false, std::memory_order_relaxed);
  }

 private:
  // A round is one word, so that what is taken from it is of this round: its number, how many tasks it has, and which is
  // the next.
  static constexpr int kBits = 21;
  static constexpr std::uint64_t kMost = (std::uint64_t{1} << kBits) - 1;
  static constexpr std::int64_t kWaitNs = 500000;
  static std::uint64_t tasks_of(std::uint64_t round) { return round >> kBits & kMost; }
  static std::uint64_t next_of(std::uint64_t round) { return round & kMost; }

  void begin(std::uint64_t count) {
    const std::uint64_t number = (round_.load(std::memory_order_relaxed) >> 2 * kBits) + 1;
    round_.store(number << 2 * kBits | count << kBits, std::memory_order_seq_cst);
  }

  static void wake(std::mutex& mutex, std::condition_variable& condition) {
    { std::lock_guard<std::mutex> lock(mutex); }
    condition.notify_all();
  }

  // Tasks of the round, as long as there are any; how many they were.
  std::size_t share() {
    std::size_t ran = 0;
    std::uint64_t round = round_.load(std::memory_order_acquire);
    while (next_of(round) < tasks_of(round)) {
      if (!round_.compare_exchange_weak(round, round + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      // It does not end before this task has: task and context are its own.
      task_(context_, next_of(round));
      ++ran;
      round = round_.load(std::memory_order_acquire);
    }
    return ran;
  }

  void work(int core) {
#if defined(__linux__)
    if (core >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(core, &set);
      pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
#else
    (void)core;
#endif
    for (;;) {
      auto begun = [&] {
        const std::uint64_t round = round_.load(std::memory_order_seq_cst);
        return next_of(round) < tasks_of(round);
      };
      if (!spin(spin_ns_, begun)) {
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        std::unique_lock<std::mutex> lock(begin_lock_);
        begin_.wait(lock, begun);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (ending_.load()) return;
      const std::size_t ran = share();
      if (ran == 0) continue;
      finished_.fetch_add(ran, std::memory_order_seq_cst);
      if (waiting_.load(std::memory_order_seq_cst)) wake(end_lock_, end_);
    }
  }

  const std::int64_t spin_ns_;
  std::vector<std::thread> threads_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::uint64_t expected_ = 0;  // of finished_, when the round ends
  alignas(64) std::atomic<std::uint64_t> round_{0};
  alignas(64) std::atomic<std::uint64_t> finished_{0};  // tasks of all rounds, by all but the caller
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> waiting_{false}, ending_{false};
  std::mutex begin_lock_, end_lock_;
  std::condition_variable begin_, end_;
};

std::atomic<int> g_size{1};
std::mutex g_lock;  // held by the call that has the team; guards what follows
std::vector<int> g_cores;
std::int64_t g_spin_ns = 50000;
std::unique_ptr<Team> g_team;

void before_fork() { g_lock.lock(); }
void after_fork() { g_lock.unlock(); }
void after_fork_in_child() {
  g_team.release();  // its threads do not exist there
  g_lock.unlock();
}

}  // namespace

void set_team(int size, const std::vector<int>& cores) {
  static const bool watched = pthread_atfork(before_fork, after_fork, after_fork_in_child) == 0;
  (void)watched;
  std::lock_guard<std::mutex> lock(g_lock);
  g_team.reset();
  g_size = size < 1 ? 1 : size;
  g_cores = cores;
}

int team_size() { return g_size; }

void set_team_spin(int microseconds) {
  std::lock_guard<std::mutex> lock(g_lock);
  g_team.reset();
  g_spin_ns = microseconds * 1000LL;
}

void team_run(std::size_t count, Task task, void* context) {
  std::unique_lock<std::mutex> lock(g_lock, std::try_to_lock);
  if (!lock) {
    while (count > 0) task(context, --count);
    return;
  }
  if (!g_team) g_team = std::make_unique<Team>(g_size, g_cores, g_spin_ns);
  g_team->run(count, task, context);
}

}  // namespace phalanx
