#include "team.hpp"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

namespace phalanx {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

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
    round_.fetch_add(1);
    wake(begin_lock_, begin_);
    for (std::thread& thread : threads_) thread.join();
  }

  void run(std::size_t count, Task task, void* context) {
    task_ = task;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    left_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) wake(begin_lock_, begin_);
    share();
    auto done = [this] { return left_.load(std::memory_order_acquire) == 0; };
    if (spin(2000000, done)) return;
    std::unique_lock<std::mutex> lock(end_lock_);
    end_.wait(lock, done);
  }

 private:
  static void wake(std::mutex& mutex, std::condition_variable& condition) {
    { std::lock_guard<std::mutex> lock(mutex); }
    condition.notify_all();
  }

  void share() {
    for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(context_, i);
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
    std::uint64_t seen = 0;
    for (;;) {
      auto begun = [&] { return round_.load(std::memory_order_acquire) != seen; };
      if (!spin(spin_ns_, begun)) {
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        std::unique_lock<std::mutex> lock(begin_lock_);
        begin_.wait(lock, [&] { return round_.load(std::memory_order_seq_cst) != seen; });
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
      ++seen;  // rounds do not overlap: the caller waits for all threads
      if (ending_.load()) return;
      share();
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) wake(end_lock_, end_);
    }
  }

  const std::int64_t spin_ns_;
  std::vector<std::thread> threads_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::size_t count_ = 0;
  alignas(64) std::atomic<std::uint64_t> round_{0};
  alignas(64) std::atomic<std::size_t> next_{0};
  alignas(64) std::atomic<int> left_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> ending_{false};
  std::mutex begin_lock_, end_lock_;
  std::condition_variable begin_, end_;
};

int g_size = 1;
std::vector<int> g_cores;
std::int64_t g_spin_ns = 50000;
std::unique_ptr<Team> g_team;

void forget_team() { g_team.release(); }  // in a fork's child the threads do not exist

}  // namespace

void set_team(int size, const std::vector<int>& cores) {
  static const bool watched = pthread_atfork(nullptr, nullptr, forget_team) == 0;
  (void)watched;
  g_team.reset();
  g_size = size < 1 ? 1 : size;
  g_cores = cores;
}

int team_size() { return g_size; }

void set_team_spin(int microseconds) {
  g_team.reset();
  g_spin_ns = microseconds * 1000LL;
}

void team_run(std::size_t count, Task task, void* context) {
  if (!g_team) g_team = std::make_unique<Team>(g_size, g_cores, g_spin_ns);
  g_team->run(count, task, context);
}

}  // namespace phalanx
