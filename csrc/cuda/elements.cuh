// Rows of 32-bit and 16-bit numbers at any address, in vectors of 16 bytes.
//
// Vectors lie at multiples of 16 bytes: those of a row that starts or ends between two such addresses are partial at
// its ends, and only there single elements are accessed. A row is walked in groups of kGroup vectors per thread, loaded
// before the first is used: enough bytes on their way to keep the memory busy.
#pragma once
#include "device.h"

namespace gk::cuda {

constexpr int kGroup = 4;

struct Vector {
    uint32_t words[4];
};

// ---- element types --------------------------------------------------------------------------------------------------
struct Float32 {
    using Element = float;
    static constexpr uint32_t kLowest = 0xFF800000u;  // -inf, in every element of a word

    static GK_DEVICE float load(float x) { return x; }
    static GK_DEVICE float round(float x) { return x; }
    static GK_DEVICE void unpack(uint32_t word, float* x) { x[0] = from_bits(word); }
    static GK_DEVICE uint32_t pack(const float* x) { return to_bits(x[0]); }
};

struct BFloat16 {
    using Element = uint16_t;
    static constexpr uint32_t kLowest = 0xFF80FF80u;

    static GK_DEVICE float load(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }
    static GK_DEVICE uint16_t round(float x) { return static_cast<uint16_t>(to_bfloats(x, 0.f)); }
    static GK_DEVICE void unpack(uint32_t word, float* x) {
        x[0] = from_bits(word << 16);
        x[1] = from_bits(word & 0xFFFF0000u);
    }
    static GK_DEVICE uint32_t pack(const float* x) { return to_bfloats(x[0], x[1]); }
};

struct Float16 {
    using Element = uint16_t;
    static constexpr uint32_t kLowest = 0xFC00FC00u;

    static GK_DEVICE float load(uint16_t x) { return half_to_float(x); }
    static GK_DEVICE uint16_t round(float x) { return static_cast<uint16_t>(to_halves(x, 0.f)); }
    static GK_DEVICE void unpack(uint32_t word, float* x) {
        x[0] = half_to_float(static_cast<uint16_t>(word));
        x[1] = half_to_float(static_cast<uint16_t>(word >> 16));
    }
    static GK_DEVICE uint32_t pack(const float* x) { return to_halves(x[0], x[1]); }
};

template <class Type>
constexpr int kSize = static_cast<int>(sizeof(typename Type::Element));
template <class Type>
constexpr int kPerVector = 16 / kSize<Type>;
template <class Type>
constexpr int kPerWord = 4 / kSize<Type>;

template <class Type>
GK_DEVICE void unpack(const Vector& vector, float (&x)[kPerVector<Type>]) {
    GK_UNROLL for (int w = 0; w < 4; w++) Type::unpack(vector.words[w], x + w * kPerWord<Type>);
}

// ---- a row to read --------------------------------------------------------------------------------------------------
template <class Type>
struct Source {
    using Element = typename Type::Element;
    const Element* aligned;  // vector v holds aligned[v * kPerVector], ...
    int first, end;          // the row is aligned[first, end)

    GK_DEVICE Source(const void* row, int columns) {
        first = static_cast<int>(reinterpret_cast<uintptr_t>(row) & 15) / kSize<Type>;
        end = first + columns;
        aligned = static_cast<const Element*>(row) - first;  // not by way of an integer: NVRTC must see device memory
    }
    GK_DEVICE int columns() const { return end - first; }
    GK_DEVICE int vectors() const { return (end + kPerVector<Type> - 1) / kPerVector<Type>; }
    GK_DEVICE int column(int vector) const { return vector * kPerVector<Type> - first; }  // of its first element
    GK_DEVICE bool inside(int column) const { return column >= 0 && column < columns(); }
    // Whether no vector of [from, to) is partial.
    GK_DEVICE bool whole(int from, int to) const {
        return from * kPerVector<Type> >= first && to * kPerVector<Type> <= end;
    }
    GK_DEVICE float at(int column) const { return Type::load(aligned[first + column]); }

    GK_DEVICE Vector load(int vector) const {
        Vector result;
        load_words(aligned + vector * kPerVector<Type>, result.words);
        return result;
    }
    // -inf outside the row.
    GK_DEVICE Vector load_partial(int vector) const {
        if (whole(vector, vector + 1)) return load(vector);
        Vector result;
        GK_UNROLL for (int w = 0; w < 4; w++) {
            float x[kPerWord<Type>];
            Type::unpack(Type::kLowest, x);
            GK_UNROLL for (int k = 0; k < kPerWord<Type>; k++) {
                const int c = column(vector) + w * kPerWord<Type> + k;
                if (inside(c)) x[k] = at(c);
            }
            result.words[w] = Type::pack(x);  // every 16-bit number comes back from its float
        }
        return result;
    }
};

// Adds a row's bias to what a vector holds; what lies outside of the row stays -inf. Read 16 bytes at a time where both
// are aligned alike, as they are for whole rows of a chunk.
template <class Type>
GK_DEVICE void add_bias(const Source<Type>& row, const float* bias, int vector, float (&x)[kPerVector<Type>]) {
    const int column = row.column(vector);
    if (row.whole(vector, vector + 1) && (reinterpret_cast<uintptr_t>(bias + column) & 15) == 0) {
        GK_UNROLL for (int part = 0; part < kPerVector<Type> / 4; part++) {
            uint32_t words[4];
            load_words(bias + column + 4 * part, words);
            GK_UNROLL for (int k = 0; k < 4; k++) x[4 * part + k] += from_bits(words[k]);
        }
    } else {
        GK_UNROLL for (int k = 0; k < kPerVector<Type>; k++) if (row.inside(column + k)) x[k] += bias[column + k];
    }
}

// Hands out the vectors [begin, end) of a row, a group to each of `workers` threads at a time: body(group, vector),
// where group[k] is vector + k * workers. All workers call the body equally often; vectors from `end` on are -inf.
template <class Type, class Body>
GK_DEVICE void walk(const Source<Type>& row, int begin, int end, int worker, int workers, const Body& body) {
    const int step = kGroup * workers;
    for (int first = begin; first < end; first += step) {
        const int last = first + step;
        if (row.whole(first, last < end ? last : end)) {
            Vector group[kGroup];
            if (last <= end) {
                GK_UNROLL for (int k = 0; k < kGroup; k++) group[k] = row.load(first + k * workers + worker);
            } else {
                GK_UNROLL for (int k = 0; k < kGroup; k++) {
                    GK_UNROLL for (uint32_t& word : group[k].words) word = Type::kLowest;
                    if (first + k * workers + worker < end) group[k] = row.load(first + k * workers + worker);
                }
            }
            body(group, first + worker);
        } else {
            for (int v = first; v < last && v < end; v += workers) {
                Vector group[1];
                GK_UNROLL for (uint32_t& word : group[0].words) word = Type::kLowest;
                if (v + worker < end) group[0] = row.load_partial(v + worker);
                body(group, v + worker);
            }
        }
    }
}

// ---- a row to write -------------------------------------------------------------------------------------------------
// Written in the vectors of the row that it is computed from: `Source` maps vectors to columns.
template <class Type, class From>
struct Target {
    using Element = typename Type::Element;
    static constexpr int kCount = kPerVector<From>, kBytes = kCount * kSize<Type>;

    Element* row;
    bool aligned;  // whole vectors of the source become kBytes at a multiple of kBytes

    GK_DEVICE Target(void* start, const Source<From>& source) : row(static_cast<Element*>(start)) {
        const auto first = reinterpret_cast<uintptr_t>(start) - static_cast<uintptr_t>(source.first * kSize<Type>);
        aligned = first % kBytes == 0;
    }
    // Elements of a vector of the source; those outside the row are dropped.
    GK_DEVICE void store(const Source<From>& source, int vector, const float (&x)[kCount]) const {
        const int column = source.column(vector);
        if (aligned && source.whole(vector, vector + 1)) {
            uint32_t words[kBytes / 4];
            GK_UNROLL for (int w = 0; w < kBytes / 4; w++) words[w] = Type::pack(x + w * kPerWord<Type>);
            store_words(row + column, words);
        } else {
            GK_UNROLL for (int k = 0; k < kCount; k++) if (source.inside(column + k)) row[column + k] =
                Type::round(x[k]);
        }
    }
    GK_DEVICE void store_one(int column, float x) const { row[column] = Type::round(x); }
};

}  // namespace gk::cuda
