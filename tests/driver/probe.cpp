// Runs the commands of its arguments against csrc/cuda/driver.h and prints what comes of them.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver.h"
#include "layout.h"

using namespace gk::cuda;

namespace {

struct Argument {
    int first;
};

template <class Call>
void attempt(const Call& call) {
    try {
        call();
    } catch (const std::runtime_error& error) {
        printf("error: %s\n", error.what());
    }
}

void launch_once(const char* kernel, LaunchConfig config) {
    attempt([&] { launch(kernel, config, Argument{7}); });
}

void call_fake(const char* function, int argument) {
    void* library = dlopen(getenv("GRPO_KERNELS_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = dlopen(getenv("GRPO_KERNELS_LIBCUDA"), RTLD_NOW);
    reinterpret_cast<void (*)(int)>(dlsym(library, function))(argument);
}

void report() { printf("built for %d: %s; driver %d\n", built_for_cuda(), built_architectures(), driver_cuda()); }

void print_device() {
    const Device& d = current_device();
    printf("device %d: %d multiprocessors, %d bytes shared\n", d.capability, d.multiprocessors, d.shared_per_block);
}

void make_map(int64_t row_stride) {
    TensorMap map = {};
    encode_tensor_map({reinterpret_cast<void*>(4096), gk::kBfloat16, 300, 200, row_stride, 128}, &map);
    printf("word %llx\n", static_cast<unsigned long long>(map.words[15]));
}

}  // namespace

int main(int count, char** arguments) {
    const LaunchConfig plain{2, 128, 0, 1, reinterpret_cast<void*>(5)};
    for (int i = 1; i < count; i++) {
        const std::string command = arguments[i];
        const auto next = [&] { return arguments[++i]; };
        if (command == "launch") {
            launch_once(next(), plain);
        } else if (command == "cluster") {
            launch_once(next(), {8, 256, 200000, 4, nullptr});
        } else if (command == "threads") {
            const char* kernel = next();
            std::vector<std::thread> threads;
            for (int t = 0; t < 8; t++) threads.emplace_back(launch_once, kernel, plain);
            for (std::thread& thread : threads) thread.join();
        } else if (command == "current") {
            call_fake("fake_make_current", atoi(next()));
        } else if (command == "reset") {
            call_fake("fake_reset", atoi(next()));
        } else if (command == "image") {
            printf("image '%s'\n", image_for(atoi(next())));
        } else if (command == "device") {
            attempt(print_device);
        } else if (command == "map") {
            attempt([&] { make_map(atoi(next())); });
        } else if (command == "report") {
            report();
        } else {
            printf("no command %s\n", command.c_str());
            return 1;
        }
        fflush(stdout);
    }
    return 0;
}
