// What tests choose of the emulated GPU, and what they look at afterwards.
#pragma once
#include <string>

#include "cuda/driver.h"

namespace gk::emulator {

struct Settings {
    unsigned order = 0;
    cuda::Device device = {90, 132, 232448};  // an H200's
    std::string last_kernel;
    cuda::LaunchConfig last_config = {};
};
Settings& settings();

}  // namespace gk::emulator
