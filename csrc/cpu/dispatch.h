// Work sharing: over the threads of torch's OpenMP where there is one, else over threads that live for one call.
//
// After each product the threads of GNU OpenMP look for work in a loop for some milliseconds, each on a core of its
// own. Other threads share the cores with them: of two cores a second thread gained nothing right after a product.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "api.h"

namespace gk {

// GOMP_parallel(function, data, threads, 0) of the OpenMP that torch has loaded, which runs function(data) in so many
// threads. Null where there is none, and in a forked process, which has none of its threads.
using OpenMPParallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
OpenMPParallel openmp_parallel();

// body(first, last) over [0, count) in pieces of `grain`, handed out in order to whoever is free. A result must depend
// on its index alone, never on the thread or the piece: then any number of threads gives the same bits. body must not
// throw.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
    const int64_t pieces = (count + grain - 1) / grain;
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
            body(piece * grain, std::min(count, (piece + 1) * grain));
    };
    const int64_t wanted = std::min<int64_t>(threads, pieces);
    if (const auto openmp = wanted > 1 ? openmp_parallel() : nullptr) {
        openmp([](void* given) { (*static_cast<decltype(work)*>(given))(); }, &work, static_cast<unsigned>(wanted), 0);
        return;
    }
    std::vector<std::thread> helpers;
    if (wanted > 1) helpers.reserve(wanted - 1);
    try {
        for (int64_t i = 1; i < wanted; i++) helpers.emplace_back(work);
    } catch (const std::system_error&) {
        // The system gives no more threads: those that started, and this one, do the work.
    }
    work();
    for (std::thread& helper : helpers) helper.join();
}

// Enough pairs of a token and an id in a piece to pay for handing it out.
inline int64_t gathered_grain(int64_t rows, int64_t pairs) {
    constexpr int64_t kPiecePairs = 512;
    return 1 + kPiecePairs * rows / std::max<int64_t>(1, pairs);
}

}  // namespace gk
