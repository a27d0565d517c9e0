// Work sharing over threads that live for one call: a few microseconds each, against kernels of milliseconds, and
// nothing to fork, to shut down or to share with another library's pool.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace gk {

// body(first, last) over [0, count) in pieces of `grain`, handed out in order to whoever is free. A result must depend
// on its index alone, never on the thread or the piece: then any number of threads gives the same bits. body must not
// throw.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
    const int64_t pieces = (count + grain - 1) / grain;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
            body(piece * grain, std::min(count, (piece + 1) * grain));
    };
    std::vector<std::thread> helpers;
    const int64_t wanted = std::min<int64_t>(threads, pieces) - 1;
    if (wanted > 0) helpers.reserve(wanted);
    try {
        for (int64_t i = 0; i < wanted; i++) helpers.emplace_back(work);
    } catch (const std::system_error&) {
        // The system gives no more threads: those that started, and this one, do the work.
    }
    work();
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace gk
