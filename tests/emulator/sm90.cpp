// The model of sm90.h, and tensor maps.
#include "sm90.h"

#include <deque>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "cuda/driver.h"

namespace gk::emulator {

namespace {

using namespace cuda;
using head::Fragment;

struct Barrier {
    uint32_t count, pending;
    int64_t bytes;  // announced and not yet arrived; less than 0 if they came first
    uint32_t phase;
};

struct NamedBarrier {
    std::set<int> arrived;  // threads
    uint64_t generation;
};

struct Load {
    TensorTiles tiles;
    int column, row;
    std::vector<char*> targets;
    std::vector<Barrier*> barriers;
    uint32_t address;
};

struct Store {
    TensorTiles tiles;
    int column, row;
    const char* shared;
    uint32_t source;
};

struct Product {
    float* result;
    const char* shared;
    uint32_t a, b;  // addresses
    bool accumulate, bfloat16;
    int thread;
};

using ThreadKey = std::pair<unsigned, int>;  // block, thread

// Of the cluster that runs. It is empty when a block initialises its barriers.
struct Model {
    std::map<std::pair<unsigned, uint32_t>, Barrier> barriers;  // block, address
    std::map<std::pair<unsigned, int>, NamedBarrier> named;
    std::vector<Load> loads;
    std::map<ThreadKey, std::deque<Store>> stores;
    std::map<ThreadKey, std::vector<uint32_t>> unfenced;
    std::map<unsigned, std::set<uint32_t>> unfenced_words;           // by block
    std::map<ThreadKey, std::deque<std::vector<Product>>> products;  // by group; the last is open
    std::mt19937 random;
};
Model& model() {
    static Model model;
    return model;
}

enum Late : unsigned { kLateLoads = 1, kLateProducts = 2, kLateStores = 4 };
bool late(Late what) { return order() >= 2 && (order() & what) != 0; }

ThreadKey me() { return {block_index(), thread_index()}; }

unsigned block_of(uint32_t rank) { return block_index() - static_cast<unsigned>(cluster_rank()) + rank; }

void require(bool condition, const char* what, const Place& place) {
    if (!condition) fail(what, place);
}

TensorTiles decode(const TensorMap* map, const Place& place) {
    require(reinterpret_cast<uintptr_t>(map) % 64 == 0, "a tensor map that is not at a multiple of 64 bytes", place);
    TensorTiles tiles;
    memcpy(&tiles, map->words, sizeof tiles);
    return tiles;
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

uint16_t* element(const TensorTiles& tiles, int64_t row, int64_t column) {
    if (row < 0 || row >= tiles.rows || column < 0 || column >= tiles.columns) return nullptr;
    return static_cast<uint16_t*>(const_cast<void*>(tiles.base)) + row * tiles.row_stride + column;
}

// body(address in the box, element of the matrix or null)
template <class Body>
void for_box(const TensorTiles& tiles, int column, int row, uint32_t address, const Body& body) {
    for (int r = 0; r < tiles.box_rows; r++)
        for (int c = 0; c < kBoxColumns; c++)
            body(swizzled(address + r * kBoxBytes + c * 2), element(tiles, row + r, column + c));
}

Barrier& barrier_at(uint32_t barrier, uint32_t rank, const Place& place) {
    const auto found = model().barriers.find({block_of(rank), barrier});
    if (found == model().barriers.end()) fail("a barrier that is not initialised", place);
    return found->second;
}

void end_phase(Barrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
}

void arrive(Barrier& barrier, const Place& place) {
    require(barrier.pending > 0, "more arrivals at a barrier than it counts", place);
    barrier.pending--;
    end_phase(barrier);
}

void perform(const Load& load) {
    for (size_t i = 0; i < load.targets.size(); i++) {
        for_box(load.tiles, load.column, load.row, load.address, [&](uint32_t address, const uint16_t* source) {
            const uint16_t value = source ? *source : 0;
            memcpy(load.targets[i] + address, &value, sizeof value);
        });
        load.barriers[i]->bytes -= load.tiles.box_rows * kBoxBytes;
        end_phase(*load.barriers[i]);
    }
}

void perform(const Store& store) {
    for_box(store.tiles, store.column, store.row, store.source, [&](uint32_t address, uint16_t* target) {
        if (target) memcpy(target, store.shared + address, sizeof *target);
    });
}

void perform(const Product& p) {
    const auto row_of = [&](uint32_t operand, int row, float (&values)[16]) {
        for (int k = 0; k < 16; k++) {
            uint16_t bits;
            memcpy(&bits, p.shared + swizzled(operand + row * kBoxBytes + k * 2), sizeof bits);
            values[k] = p.bfloat16 ? from_bits(static_cast<uint32_t>(bits) << 16) : half_to_float(bits);
        }
    };
    float a[2][16], b[16];
    for (int half = 0; half < 2; half++) row_of(p.a, Fragment::row(p.thread, half), a[half]);
    for (int group = 0; group < Fragment::kGroups; group++) {
        for (int pair = 0; pair < 2; pair++) {
            row_of(p.b, Fragment::column(p.thread, group, pair), b);
            for (int half = 0; half < 2; half++) {
                float& result = p.result[Fragment::index(group, half, pair)];
                float sum = p.accumulate ? result : 0.f;
                for (int k = 0; k < 16; k++) sum += a[half][k] * b[k];
                result = sum;
            }
        }
    }
}

uint32_t operand_address(uint64_t descriptor, const Place& place) {
    require(descriptor >> 62 == 1 && (descriptor >> 32 & 0x3FFF) == 64, "an operand of another layout", place);
    return static_cast<uint32_t>(descriptor & 0x3FFF) << 4;
}

// Any of the copies that are on their way arrives.
bool perform_some_load() {
    Model& m = model();
    if (m.loads.empty()) return false;
    const size_t chosen = m.random() % m.loads.size();
    const Load load = m.loads[chosen];
    m.loads.erase(m.loads.begin() + static_cast<std::ptrdiff_t>(chosen));
    perform(load);
    return true;
}

}  // namespace

}  // namespace gk::emulator

namespace gk::cuda::head {

using namespace emulator;

void store_shared(uint32_t address, uint32_t value, const Place& place) {
    require(address % 4 == 0, "a store at an odd address", place);
    memcpy(dynamic_shared() + address, &value, sizeof value);
    model().unfenced[me()].push_back(address);
    model().unfenced_words[block_index()].insert(address);
}

void fence_shared_for_tma() {
    std::vector<uint32_t>& mine = model().unfenced[me()];
    for (const uint32_t address : mine) model().unfenced_words[block_index()].erase(address);
    mine.clear();
}

void barrier_init(uint32_t barrier, uint32_t count, const Place& place) {
    require(barrier % 8 == 0, "a barrier that is not at a multiple of 8 bytes", place);
    remote(dynamic_shared() + barrier, cluster_rank(), place);
    Model& m = model();
    m.barriers[{block_index(), barrier}] = {count, count, 0, 0};
    // Nothing of the last launch is left, which may have ended with an error.
    m.loads.clear(), m.named.clear(), m.stores.clear(), m.products.clear();
    m.unfenced.clear(), m.unfenced_words.clear();
}

void barrier_expect(uint32_t barrier, uint32_t bytes, const Place& place) {
    Barrier& here = barrier_at(barrier, cluster_rank(), place);
    here.bytes += bytes;
    arrive(here, place);
}

void barrier_arrive(uint32_t barrier, uint32_t rank, const Place& place) {
    remote(dynamic_shared() + barrier, static_cast<int>(rank), place);  // the block lives
    arrive(barrier_at(barrier, rank, place), place);
}

void barrier_wait(uint32_t barrier, uint32_t parity, const Place& place) {
    const Barrier& here = barrier_at(barrier, cluster_rank(), place);
    wait_until([&here, parity] { return here.phase != parity; }, place);
}

void named_barrier(int id, int threads, bool wait, const Place& place) {
    NamedBarrier& barrier = model().named[{block_index(), id}];
    require(barrier.arrived.insert(thread_index()).second, "a second arrival at a named barrier", place);
    const uint64_t generation = barrier.generation;
    if (static_cast<int>(barrier.arrived.size()) == threads) {
        barrier.generation++;
        barrier.arrived.clear();
    }
    if (wait) wait_until([&barrier, generation] { return barrier.generation != generation; }, place);
}

void tma_load_multicast(uint32_t target, const TensorMap* map, int column, int row, uint32_t barrier, uint16_t blocks,
                        const Place& place) {
    require(target % 1024 == 0, "a swizzled box that is not at a multiple of 1,024 bytes", place);
    Load load = {decode(map, place), column, row, {}, {}, target};
    for (int rank = 0; rank < cluster_size(); rank++) {
        if (!(blocks >> rank & 1)) continue;
        void* there = remote(dynamic_shared() + target, rank, place);
        load.targets.push_back(static_cast<char*>(there) - target);
        load.barriers.push_back(&barrier_at(barrier, rank, place));
    }
    when_idle(perform_some_load);
    if (late(kLateLoads))
        model().loads.push_back(load);
    else
        perform(load);
}

void tma_store(const TensorMap* map, int column, int row, uint32_t source, uint64_t, const Place& place) {
    const Store store = {decode(map, place), column, row, dynamic_shared(), source};
    require(source % 1024 == 0, "a swizzled box that is not at a multiple of 1,024 bytes", place);
    for (const uint32_t address : model().unfenced_words[block_index()])
        require(address < source || address >= source + store.tiles.box_rows * kBoxBytes,
                "a store of what no fence has made visible", place);
    model().stores[me()].push_back(store);
    if (!late(kLateStores)) perform(store);
}

void wait_for_stores(int pending) {
    std::deque<Store>& mine = model().stores[me()];
    while (mine.size() > static_cast<size_t>(pending)) {
        if (late(kLateStores)) perform(mine.front());
        mine.pop_front();
    }
}

void multiply(float* result, uint64_t a, uint64_t b, bool accumulate, bool bfloat16, const Place& place) {
    const int thread = thread_index() % kWarpgroup;
    const Product product = {
        result, dynamic_shared(), operand_address(a, place), operand_address(b, place), accumulate, bfloat16, thread};
    if (!late(kLateProducts)) return perform(product);
    auto& groups = model().products[me()];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(product);
}

void wgmma_commit() {
    if (late(kLateProducts)) model().products[me()].emplace_back();
}

void wait_for_products(int pending) {
    auto& groups = model().products[me()];
    while (groups.size() > static_cast<size_t>(pending) + 1) {
        for (const Product& product : groups.front()) perform(product);
        groups.pop_front();
    }
}

}  // namespace gk::cuda::head

namespace gk::cuda {

void encode_tensor_map(const TensorTiles& tiles, TensorMap* map) {
    static_assert(sizeof tiles <= sizeof map->words, "");
    if (reinterpret_cast<uintptr_t>(tiles.base) % 16 != 0 || tiles.row_stride % 8 != 0 ||
        tiles.row_stride < tiles.columns || tiles.rows < 1 || tiles.columns < 1 || tiles.box_rows < 1 ||
        tiles.box_rows > 256)
        throw std::runtime_error("emulator: a matrix that TMA cannot describe");
    *map = {};
    memcpy(map->words, &tiles, sizeof tiles);
}

}  // namespace gk::cuda
