// The scheduler of the emulated GPU, its numbers, and csrc/cuda/driver.h on top of it. See emulator.h.
#include "emulator.h"

#include <stdlib.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/lm_head_schedule.h"
#include "fiber.h"

namespace gk::emulator {

namespace {

constexpr int kWarpLanes = 32;
constexpr size_t kStackSize = 128 << 10;
constexpr size_t kGuard = 4096;  // bytes after shared memory that nobody may write
constexpr char kPoison = '\xFF';

enum class State { kReady, kAtWarp, kAtBlock, kAtCluster, kAtCondition, kDone };
constexpr const char* kStateNames[] = {
    "running", "a warp's barrier or shuffle", "a block's barrier", "a cluster's barrier", "a condition", "the end"};

// What tests choose, and what they look at afterwards.
struct Settings {
    unsigned order = 0;
    cuda::Device device = {90, 132, 232448};  // an H200's
    unsigned largest_grid = 0, launches = 0;
};
Settings& settings() {
    static Settings settings;
    return settings;
}

struct Block;

struct Fiber {
    Context context;
    char* stack;
    Block* block;
    int thread;
    State state = State::kReady;
    Place place = {"the start", 0};
    uint64_t values[2] = {};  // of shuffles, in turn: a lane may be one shuffle ahead of another that has yet to read
    int turn = 0;
    bool arrived = false;  // at the cluster's barrier
    std::function<bool()> condition;
};

struct Block {
    unsigned index;
    int rank;
    std::unique_ptr<char[]> shared;
    std::vector<Fiber> fibers;
    bool started = false, ended = false;
};

struct Kernel {
    int threads;
    size_t size;
    void (*run)(const void*);
};
std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

std::string described(const Place& place) {
    const std::string file = place.file;
    return file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line);
}

class Machine {
  public:
    void launch(const char* name, const Kernel& kernel, const cuda::LaunchConfig& config, const void* args) {
        kernel_ = &kernel, name_ = name, args_ = args, config_ = config, error_.clear();
        random_.seed(settings().order);
        std::vector<unsigned> clusters(config.grid / config.cluster);
        for (size_t i = 0; i < clusters.size(); i++) clusters[i] = static_cast<unsigned>(i);
        if (settings().order == 1) std::reverse(clusters.begin(), clusters.end());
        if (settings().order > 1) std::shuffle(clusters.begin(), clusters.end(), random_);
        for (const unsigned cluster : clusters) run_cluster(cluster);
    }

    bool (*idle)() = nullptr;

    // ---- for fibers
    Fiber& current() { return *current_; }
    const cuda::LaunchConfig& config() const { return config_; }
    Block& block(int rank) { return blocks_[rank]; }
    void wait(State state, const Place& place) {
        current_->state = state, current_->place = place;
        switcher_.leave(current_->context, false);
    }
    [[noreturn]] void fail(const std::string& what, const Place& place) {
        error_ = what + " at " + described(place) + ", block " + std::to_string(current_->block->index) + ", thread " +
                 std::to_string(current_->thread);
        switcher_.leave(current_->context, true);
        abort();
    }
    void run_fiber() {
        switcher_.entered();
        kernel_->run(args_);
        current_->state = State::kDone;
        current_->place = {"the end", 0};
        switcher_.leave(current_->context, true);
        abort();
    }

  private:
    void run_cluster(unsigned cluster);
    void run_warp(Block& block, int warp);
    void open_barriers(Block& block);
    bool all_at(const Block& block, State state) const;
    [[noreturn]] void deadlock();
    void release_group(std::vector<Fiber*>& fibers, State barrier, const char* whose);
    void check_ended(Block& block);
    [[noreturn]] void stop(const std::string& what) { throw std::runtime_error("emulator, " + name_ + ": " + what); }

    std::string name_, error_;
    const Kernel* kernel_ = nullptr;
    const void* args_ = nullptr;
    cuda::LaunchConfig config_ = {};
    std::vector<Block> blocks_;
    std::vector<std::unique_ptr<char[]>> stacks_;
    Fiber* current_ = nullptr;
    Switcher switcher_;
    std::mt19937 random_;
};

Machine& machine() {
    static Machine machine;
    return machine;
}

void Machine::run_cluster(unsigned cluster) {
    blocks_.clear();
    blocks_.resize(config_.cluster);
    const size_t threads = config_.block;
    while (stacks_.size() < config_.cluster * threads) stacks_.emplace_back(new char[kStackSize]);
    for (unsigned rank = 0; rank < config_.cluster; rank++) {
        Block& block = blocks_[rank];
        block.index = cluster * config_.cluster + rank;
        block.rank = static_cast<int>(rank);
        block.shared.reset(new char[config_.shared + kGuard]);
        memset(block.shared.get(), kPoison, config_.shared + kGuard);
        block.fibers.resize(threads);
        for (size_t t = 0; t < threads; t++) {
            Fiber& fiber = block.fibers[t];
            fiber.block = &block, fiber.thread = static_cast<int>(t), fiber.stack = stacks_[rank * threads + t].get();
            clear_stack(fiber.stack, kStackSize);
            make_context(fiber.context, fiber.stack, kStackSize, [] { machine().run_fiber(); });
        }
    }
    std::vector<std::pair<Block*, int>> runnable;
    for (;;) {
        runnable.clear();
        bool all_done = true;
        for (Block& block : blocks_) {
            for (size_t t = 0; t < threads; t++) {
                Fiber& fiber = block.fibers[t];
                if (fiber.state == State::kAtCondition && fiber.condition()) fiber.state = State::kReady;
                all_done &= fiber.state == State::kDone;
                const std::pair<Block*, int> warp = {&block, static_cast<int>(t) / kWarpLanes};
                if (block.fibers[t].state == State::kReady && (runnable.empty() || runnable.back() != warp))
                    runnable.push_back(warp);
            }
        }
        if (all_done) return;
        if (runnable.empty() && idle && idle()) continue;
        if (runnable.empty()) deadlock();
        // The first warp, the last or any one of them runs until all its threads wait.
        const size_t order = settings().order;
        const size_t chosen = order == 0   ? 0
                              : order == 1 ? runnable.size() - 1
                                           : std::uniform_int_distribution<size_t>(0, runnable.size() - 1)(random_);
        run_warp(*runnable[chosen].first, runnable[chosen].second);
        open_barriers(*runnable[chosen].first);
        check_ended(*runnable[chosen].first);
    }
}

void Machine::run_warp(Block& block, int warp) {
    std::vector<Fiber*> lanes;
    for (int lane = 0; lane < kWarpLanes; lane++) lanes.push_back(&block.fibers[warp * kWarpLanes + lane]);
    std::vector<Fiber*> order = lanes;
    block.started = true;
    for (bool more = true; more;) {
        if (settings().order == 1) order.assign(lanes.rbegin(), lanes.rend());
        if (settings().order > 1) std::shuffle(order.begin(), order.end(), random_);
        for (Fiber* fiber : order) {
            if (fiber->state != State::kReady) continue;
            current_ = fiber;
            switcher_.enter(fiber->context, fiber->stack, kStackSize);
            if (!error_.empty()) stop(error_);
        }
        more = std::all_of(lanes.begin(), lanes.end(), [](Fiber* f) { return f->state == State::kAtWarp; });
        if (more) release_group(lanes, State::kAtWarp, "warp");
    }
}

bool Machine::all_at(const Block& block, State state) const {
    const auto here = [&](const Fiber& fiber) { return fiber.state == state; };
    return std::all_of(block.fibers.begin(), block.fibers.end(), here);
}

// Barriers open as soon as all have reached them, so that a block may run far ahead of the others of its cluster.
void Machine::open_barriers(Block& block) {
    std::vector<Fiber*> fibers;
    if (all_at(block, State::kAtBlock)) {
        for (Fiber& fiber : block.fibers) fibers.push_back(&fiber);
        release_group(fibers, State::kAtBlock, "block");
    }
    for (Block& other : blocks_)
        if (!all_at(other, State::kAtCluster)) return;
    for (Block& other : blocks_)
        for (Fiber& fiber : other.fibers) fibers.push_back(&fiber), fiber.arrived = false;
    release_group(fibers, State::kAtCluster, "cluster");
}

void Machine::deadlock() {
    std::map<std::string, int> waiting;
    for (const Block& block : blocks_)
        for (const Fiber& fiber : block.fibers)
            waiting[std::string(kStateNames[static_cast<int>(fiber.state)]) + " (" + described(fiber.place) + ")"]++;
    std::string text = "deadlock:";
    for (const auto& [where, count] : waiting) text += " " + std::to_string(count) + " threads at " + where + ";";
    text.pop_back();
    stop(text);
}

void Machine::release_group(std::vector<Fiber*>& fibers, State barrier, const char* whose) {
    for (Fiber* fiber : fibers) {
        const Place &here = fiber->place, &there = fibers[0]->place;
        if (here.line != there.line || strcmp(here.file, there.file) != 0)
            stop(std::string("threads of a ") + whose + " wait at different places: " + described(here) + " and " +
                 described(there));
        if (fiber->state == barrier) fiber->state = State::kReady;
    }
}

void Machine::check_ended(Block& block) {
    if (!all_at(block, State::kDone)) return;
    block.ended = true;
    for (size_t i = 0; i < kGuard; i++)
        if (block.shared[config_.shared + i] != kPoison) stop("a store past the end of shared memory");
}

}  // namespace

Registration::Registration(const char* name, int threads, size_t size, void (*run)(const void*)) {
    kernels()[name] = {threads, size, run};
}

unsigned order() { return settings().order; }
int cluster_size() { return static_cast<int>(machine().config().cluster); }

uint64_t shuffle_xor(uint64_t value, int mask, const Place& place) {
    Fiber& fiber = machine().current();
    const int turn = fiber.turn;
    fiber.turn = 1 - turn;
    fiber.values[turn] = value;
    machine().wait(State::kAtWarp, place);
    return fiber.block->fibers[fiber.thread ^ mask].values[turn];
}

void wait_until(const std::function<bool()>& condition, const Place& place) {
    if (condition()) return;
    machine().current().condition = condition;
    machine().wait(State::kAtCondition, place);
}
void when_idle(bool (*act)()) { machine().idle = act; }
void fail(const std::string& what, const Place& place) { machine().fail(what, place); }

void* remote(void* address, int rank, const Place& place) {
    Machine& m = machine();
    if (rank < 0 || rank >= cluster_size()) m.fail("no block " + std::to_string(rank) + " in the cluster", place);
    const ptrdiff_t offset = static_cast<char*>(address) - cuda::dynamic_shared();
    if (offset < 0 || offset >= static_cast<ptrdiff_t>(m.config().shared)) m.fail("not in shared memory", place);
    Block& there = m.block(rank);
    if (!there.started) m.fail("access to a block of the cluster that has not started", place);
    if (there.ended) m.fail("access to a block of the cluster that has ended", place);
    return there.shared.get() + offset;
}

// ---- the conversions of cvt instructions, in integer arithmetic
uint16_t float_to_bfloat(float x) {
    const uint32_t bits = cuda::to_bits(x);
    if (x != x) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t float_to_half(float x) {
    const uint16_t sign = static_cast<uint16_t>(cuda::to_bits(x) >> 16 & 0x8000u);
    if (x != x) return 0x7FFF;
    const float magnitude = fabsf(x);
    if (magnitude >= 65520.f) return sign | 0x7C00u;
    // nearbyint rounds to nearest even; in units of the last place a half has eleven significant bits.
    int exponent = magnitude == 0.f ? -14 : ilogbf(magnitude);
    if (exponent < -14) exponent = -14;
    const auto units = static_cast<uint32_t>(nearbyintf(ldexpf(magnitude, 10 - exponent)));
    return static_cast<uint16_t>(sign + (static_cast<uint32_t>(exponent + 14) << 10) + units);
}

}  // namespace gk::emulator

namespace gk::cuda {

using namespace emulator;

int thread_index() { return machine().current().thread; }
int block_threads() { return static_cast<int>(machine().config().block); }
unsigned block_index() { return machine().current().block->index; }
unsigned block_count() { return machine().config().grid; }
int cluster_rank() { return machine().current().block->rank; }
char* dynamic_shared() { return machine().current().block->shared.get(); }

void block_sync(const Place& place) { machine().wait(State::kAtBlock, place); }
void warp_sync(const Place& place) { machine().wait(State::kAtWarp, place); }
void cluster_arrive(const Place& place) {
    Fiber& fiber = machine().current();
    if (fiber.arrived) fail("a second arrival at the cluster's barrier without a wait", place);
    fiber.arrived = true;
}
void cluster_wait(const Place& place) {
    if (!machine().current().arrived) fail("a wait for the cluster's barrier without an arrival", place);
    machine().wait(State::kAtCluster, place);
}

float half_to_float(uint16_t half) {
    const float sign = half & 0x8000u ? -1.f : 1.f;
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? ldexpf(fraction, -24) : ldexpf(fraction + 1024, exponent - 25));
}

void launch(const char* kernel, const LaunchConfig& config, const void* argument, size_t size) {
    const auto fail = [&](const std::string& what) {
        throw std::runtime_error(std::string("emulator, ") + kernel + ": " + what);
    };
    const auto found = kernels().find(kernel);
    if (found == kernels().end()) fail("no such kernel");
    const Device& device = current_device();
    if (size != found->second.size) fail("an argument of the wrong size");
    if (config.grid == 0 || config.grid > 0x7FFFFFFFu) fail("an impossible grid");
    if (config.block == 0 || config.block % 32 != 0 || config.block > static_cast<unsigned>(found->second.threads))
        fail("an impossible block of " + std::to_string(config.block));
    if (config.cluster == 0 || config.cluster > 8 || config.grid % config.cluster != 0) fail("an impossible cluster");
    if (config.cluster > 1 && device.capability < 90) fail("no clusters on this device");
    if (config.shared > static_cast<unsigned>(device.shared_per_block)) fail("too much shared memory");
    settings().largest_grid = std::max(settings().largest_grid, config.grid);
    settings().launches++;
    machine().launch(kernel, found->second, config, argument);
}

const Device& current_device() { return settings().device; }
int built_for_cuda() { return 0; }
const char* built_architectures() { return "emulator"; }
int driver_cuda() { return 0; }
const char* image_for(int capability) { return capability == 90 ? "sm_90a" : "emulator"; }

}  // namespace gk::cuda

// ---- what tests choose and see, for Python's ctypes: the functions of a module that is imported too
#define GK_EXPORT extern "C" __attribute__((visibility("default")))

using gk::emulator::settings;

GK_EXPORT void gk_emulator_use(const int* device, unsigned order) {
    settings().device = {device[0], device[1], device[2]};
    settings().order = order;
    settings().largest_grid = settings().launches = 0;
}

GK_EXPORT unsigned gk_emulator_largest_grid() { return settings().largest_grid; }
GK_EXPORT unsigned gk_emulator_launches() { return settings().launches; }

// The longest time of a cluster, in tiles, where an item costs a twentieth of one beyond its own.
GK_EXPORT double gk_longest_cluster(int64_t rows, int64_t vocab, int64_t width, bool any_batch) {
    using namespace gk::cuda::head;
    const Schedule schedule = make_schedule(rows, vocab, width, any_batch);
    const uint32_t clusters = gk::cuda::current_device().multiprocessors / schedule.cluster;
    std::vector<double> time(clusters);
    for (uint32_t i = 0; i < item_count(schedule); i++) {
        const Item item = place(schedule, i);
        time[i % clusters] += item.last_tile - item.first_tile + 0.05;
    }
    return *std::max_element(time.begin(), time.end());
}

// Whether the items are every tile of every row block just once, in parts that start where the last one ends.
GK_EXPORT bool gk_items_cover(uint32_t row_blocks, uint32_t tiles, uint32_t parts, uint32_t group) {
    using namespace gk::cuda::head;
    const Schedule schedule = {1, row_blocks, tiles, parts, group};
    std::vector<int> seen(static_cast<size_t>(row_blocks) * tiles);
    for (uint32_t i = 0; i < item_count(schedule); i++) {
        const Item item = place(schedule, i);
        const uint32_t length = item.last_tile - item.first_tile;
        if (item.row_block >= row_blocks || item.last_tile > tiles || length - tiles / parts > 1) return false;
        for (uint32_t tile = item.first_tile; tile < item.last_tile; tile++) seen[item.row_block * tiles + tile]++;
    }
    for (const int count : seen)
        if (count != 1) return false;
    return true;
}
