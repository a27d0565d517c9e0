// What tests choose of the emulated GPU, and what they look at afterwards.
#pragma once
#include <stdlib.h>

#include <string>

#include "cuda/driver.h"

namespace gk::emulator {

// "capability, multiprocessors, shared memory per block and per multiprocessor, L2 cache", an H200's by default.
inline cuda::Device parse_device(const char* text) {
    int values[5] = {90, 132, 232448, 233472, 62914560};
    for (int i = 0; text && *text && i < 5; i++) {
        char* end;
        values[i] = static_cast<int>(strtol(text, &end, 10));
        text = *end ? end + 1 : end;
    }
    return {values[0], values[1], values[2], values[3], values[4]};
}

struct Settings {
    unsigned order = getenv("GK_EMULATOR_ORDER") ? static_cast<unsigned>(atoi(getenv("GK_EMULATOR_ORDER"))) : 0;
    cuda::Device device = parse_device(getenv("GK_EMULATOR_DEVICE"));
    int launches = 0;  // so far
    std::string last_kernel;
    cuda::LaunchConfig last_config = {};
};
Settings& settings();

}  // namespace gk::emulator
