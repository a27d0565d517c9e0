// How a warpgroup holds a 64 x 256 product in registers: the accumulator of wgmma.m64n256k16, PTX ISA, "Register
// fragments for wgmma.mma_async.m64nNk16". Written down here once, for the epilogues and for the tests' model of wgmma.
#pragma once
#include "device.h"

namespace gk::cuda::head {

constexpr int kWarpgroup = 128;  // threads

// Columns come in 32 groups of 8. In each a thread has two neighbours ("pair") of two rows ("half").
struct Fragment {
    static constexpr int kRows = 64, kColumns = 256, kGroups = 32;
    float value[kGroups * 4];

    static GK_DEVICE constexpr int index(int group, int half, int pair) { return 4 * group + 2 * half + pair; }
    static GK_DEVICE constexpr int row(int thread, int half) { return thread / 32 * 16 + thread % 32 / 4 + 8 * half; }
    static GK_DEVICE constexpr int first_column(int thread) { return thread % 4 * 2; }
    static GK_DEVICE constexpr int column(int thread, int group, int pair) {
        return 8 * group + first_column(thread) + pair;
    }
};

}  // namespace gk::cuda::head
