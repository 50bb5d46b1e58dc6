// What a thread that waits without sleeping needs: the time, and a rest for the core.
#pragma once

#include <time.h>

#include <cstdint>

namespace phalanx {

inline std::int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace phalanx
