// AMX, the matrix unit of some processors, which kernels/block_amx.cpp uses beside AVX-512.
#pragma once

namespace phalanx {

// Why it is not used here, in a few words; empty where it is, and where no processor of the kind has it. The first call
// asks processor and operating system, gets this process's permission, and compares results.
const char* amx_refusal();
// Whether its products are those of AVX-512 to the bit, for some numbers of each kind of weight. It ends a process on a
// machine without AMX.
bool amx_agrees();

}  // namespace phalanx
