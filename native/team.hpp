// The threads that share a kernel's work: the caller and size() - 1 others, started at the first use after set_size
// (never before a fork) and pinned to the given cores. Between two calls they spin for a moment, then sleep.
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

namespace phalanx {

// Ends the old threads. `cores[i]` is where thread i runs, the caller (thread 0) excepted; empty leaves them free.
void set_team(int size, const std::vector<int>& cores);
int team_size();
// Microseconds that a thread spins before it sleeps; 0 where others need the cores.
void set_team_spin(int microseconds);

using Task = void (*)(void* context, std::size_t index);
// fn(context, i) for i in 0 … count - 1, shared among the threads as they come free; returns when all are done.
// What a task computes must not depend on which thread runs it; a task must not throw. The threads serve one call at a
// time: whoever calls meanwhile runs its tasks itself.
void team_run(std::size_t count, Task task, void* context);

template <typename F>
void parallel_for(std::size_t count, F&& fn) {
  if (count == 1 || team_size() == 1) {
    for (std::size_t i = 0; i < count; ++i) fn(i);
    return;
  }
  using Fn = std::remove_reference_t<F>;
  team_run(count, [](void* context, std::size_t i) { (*static_cast<Fn*>(context))(i); }, &fn);
}

}  // namespace phalanx
