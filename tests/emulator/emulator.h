// A GPU on the CPU, for tests: what csrc/cuda/device.h needs of one. A thread is a fiber; the blocks of a cluster live
// at the same time, clusters run one after another. The order in which threads run between barriers is chosen, so that
// a missing barrier shows: 0 runs the lowest warp as far as it can go, 1 the highest, any other number is a random
// seed.
//
// What the hardware leaves undefined is an error here: barriers and shuffles that not all threads of a block, cluster
// or warp reach at the same line, shared memory of a block that has not started or has ended, stores past the end of
// shared memory. Shared memory starts as NaN.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <string>

#define GK_DEVICE inline
#define GK_UNROLL _Pragma("GCC unroll 16")
#define GK_HERE const ::gk::emulator::Place& place = {__builtin_FILE(), __builtin_LINE()}

#define GK_KERNEL(name, Args, threads, blocks)                                                          \
    static void name(const Args& args);                                                                 \
    static const ::gk::emulator::Registration registration_of_##name(                                   \
        #name, threads, sizeof(Args), [](const void* args) { name(*static_cast<const Args*>(args)); }); \
    static void name(const Args& args)

namespace gk::emulator {

struct Place {
    const char* file;
    int line;
};

struct Registration {
    Registration(const char* name, int threads, size_t size, void (*run)(const void* args));
};

unsigned order();  // of threads
int cluster_size();
uint64_t shuffle_xor(uint64_t value, int mask, const Place& place);
void* remote(void* address, int rank, const Place& place);
void wait_until(const std::function<bool()>& condition, const Place& place);
void when_idle(bool (*act)());  // called when no thread can run; false: it has done nothing
[[noreturn]] void fail(const std::string& what, const Place& place);

// Rounded to nearest even.
uint16_t float_to_half(float x);
uint16_t float_to_bfloat(float x);

}  // namespace gk::emulator

namespace gk::cuda {

// Of the thread that is running.
int thread_index();
int block_threads();
unsigned block_index();
unsigned block_count();
int cluster_rank();
char* dynamic_shared();

void block_sync(GK_HERE);
void warp_sync(GK_HERE);
void cluster_arrive(GK_HERE);
void cluster_wait(GK_HERE);

template <class T>
GK_DEVICE T shuffle_xor(T value, int mask, GK_HERE) {
    static_assert(sizeof(T) <= 8, "");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulator::shuffle_xor(bits, mask, place);
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Blocks of different clusters run one after another.
GK_DEVICE int32_t atomic_add(int32_t* address, int32_t value) {
    const int32_t before = *address;
    *address += value;
    return before;
}
GK_DEVICE void device_fence() {}

template <int count>
struct alignas(4 * count) Words {  // the sanitizers see that an address is no multiple of the size
    uint32_t words[count];
};
GK_DEVICE void load_words(const void* address, uint32_t (&words)[4]) {
    const Words<4> all = *static_cast<const Words<4>*>(address);
    memcpy(words, all.words, sizeof words);
}
template <int count>
GK_DEVICE void store_words(void* address, const uint32_t (&words)[count]) {
    Words<count> all;
    memcpy(all.words, words, sizeof words);
    *static_cast<Words<count>*>(address) = all;
}

GK_DEVICE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
GK_DEVICE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
GK_DEVICE float exp2_fast(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.f : y;
}
GK_DEVICE float reciprocal_fast(float x) { return 1.f / x; }
GK_DEVICE float max_or_nan(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
GK_DEVICE float min_or_nan(float x, float y) { return x != x || y != y ? NAN : fminf(x, y); }

float half_to_float(uint16_t half);
GK_DEVICE uint32_t to_halves(float low, float high) {
    return emulator::float_to_half(low) | static_cast<uint32_t>(emulator::float_to_half(high)) << 16;
}
GK_DEVICE uint32_t to_bfloats(float low, float high) {
    return emulator::float_to_bfloat(low) | static_cast<uint32_t>(emulator::float_to_bfloat(high)) << 16;
}

}  // namespace gk::cuda
