// The emulated head kernels for Python's ctypes.
#include <exception>
#include <string>
#include <vector>

#include "cuda/lm_head_schedule.h"
#include "settings.h"

extern "C" {

size_t gk_head_args_size() { return sizeof(gk::cuda::HeadArgs); }

bool gk_serves_head(const gk::cuda::HeadArgs* args) { return gk::cuda::supports_head(*args); }

size_t gk_head_workspace(const gk::cuda::HeadArgs* args) { return gk::cuda::head_workspace(*args); }

// Null, or what went wrong; valid until the next call.
const char* gk_head(bool anchored, const gk::cuda::HeadArgs* args) {
    static std::string error;
    try {
        std::vector<double> workspace(gk::cuda::head_workspace(*args) / sizeof(double) + 1, __builtin_nan(""));
        (anchored ? gk::cuda::anchored : gk::cuda::linear_logp)(*args, workspace.data(), nullptr);
    } catch (const std::exception& exception) {
        error = exception.what();
        return error.c_str();
    }
    return nullptr;
}

// Whether the items are every tile of every row block just once, in parts that start where the last one ends.
bool gk_items_cover(uint32_t row_blocks, uint32_t tiles, uint32_t per_part, uint32_t group) {
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

void gk_emulator_order(unsigned order) { gk::emulator::settings().order = order; }
void gk_emulator_device(const char* device) { gk::emulator::settings().device = gk::emulator::parse_device(device); }

}  // extern "C"
