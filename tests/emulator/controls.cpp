// What tests choose and see of the emulated GPU, for Python's ctypes: the functions of a module that is imported too.
#include <vector>

#include "cuda/lm_head_schedule.h"
#include "settings.h"

#define GK_EXPORT extern "C" __attribute__((visibility("default")))

using gk::emulator::settings;

GK_EXPORT void gk_emulator_use(const int* device, unsigned order) {
    settings().device = {device[0], device[1], device[2], device[3], device[4]};
    settings().order = order;
}

GK_EXPORT const char* gk_emulator_last_kernel() { return settings().last_kernel.c_str(); }
GK_EXPORT void gk_emulator_last_launch(unsigned* values) {
    const gk::cuda::LaunchConfig& config = settings().last_config;
    values[0] = config.grid, values[1] = config.block, values[2] = config.shared, values[3] = config.cluster;
}

// Whether the items are every tile of every row block just once, in parts that start where the last one ends.
GK_EXPORT bool gk_items_cover(uint32_t row_blocks, uint32_t tiles, uint32_t per_part, uint32_t group) {
    using namespace gk::cuda::head;
    const uint32_t parts = (tiles + per_part - 1) / per_part;
    const Schedule schedule = {1, row_blocks, tiles, per_part, parts, group};
    std::vector<int> seen(static_cast<size_t>(row_blocks) * tiles);
    for (uint32_t i = 0; i < item_count(schedule); i++) {
        const Item item = place(schedule, i);
        if (item.row_block >= row_blocks || item.first_tile != item.part * per_part || item.last_tile > tiles)
            return false;
        for (uint32_t tile = item.first_tile; tile < item.last_tile; tile++) seen[item.row_block * tiles + tile]++;
    }
    for (const int count : seen)
        if (count != 1) return false;
    return true;
}
