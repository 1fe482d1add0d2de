// What decode and prefill share: pages of a row, the sections of one kv head in a sealed page, per-thread scratch.
#pragma once
#include <cstddef>
#include <cstdlib>

#include <omp.h>

#include "ktx.h"
#include "scales.h"

namespace KTX_NS {

using namespace ktx;

constexpr float kNegInf = -__builtin_inff();
constexpr int kMaxPage = 256, kMaxDim = 512;

// Scratch of one thread: buffers that grow and stay. A slot has one owner, so a caller and its callee never share.
enum WorkSlot {
  kTasks, kPartials, kDecodeQuery, kDecodeScores, kDecodeAcc, kDecodeMerge, kSeal,
  kPrefill0, kPrefill1, kPrefill2, kPrefill3,
  kSparseUnits, kSparseMemory, kSparseRanked, kSparseBlock, kSparseList,
  kSparseKnown, kSparseSpread, kWaveStamps, kWavePages, kPagedTasks, kPagedState, kWorkSlots
};

struct Workspace {
  void* data[kWorkSlots] = {};
  size_t size[kWorkSlots] = {};
  ~Workspace() { for (void* p : data) std::free(p); }

  template <class T>
  T* get(WorkSlot slot, size_t count) {  // 64-byte aligned, contents undefined
    const size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
    if (bytes > size[slot]) {
      std::free(data[slot]);
      data[slot] = std::aligned_alloc(64, bytes);
      if (!data[slot]) std::abort();
      size[slot] = bytes;
    }
    return static_cast<T*>(data[slot]);
  }
};

static inline Workspace& thread_workspace() {
  static thread_local Workspace workspace;
  return workspace;
}

KTX_INLINE int thread_count(int asked) { return asked > 0 ? asked : omp_get_max_threads(); }

// One page of a row's context: exactly one of the pointers is set.
struct PageRef {
  const uint8_t* plain;    // K[num_kv_heads][page_size][head_dim], then V, in the model's dtype
  const uint8_t* payload;  // sealed
  int tokens;              // that belong to the row: page_size but for the last page
};

KTX_INLINE int context_pages(const AttentionArgs& a, int row) {
  return (a.context[row] + a.layout->page_size - 1) / a.layout->page_size;
}

KTX_INLINE PageRef page_at(const AttentionArgs& a, int row, int index) {
  const int page_size = a.layout->page_size;
  const int block = a.block_table[int64_t(row) * a.table_stride + index];
  const int open = a.open_slot[block];
  PageRef ref{nullptr, nullptr, min_of(page_size, a.context[row] - index * page_size)};
  if (open >= 0) {
    ref.plain = a.open_pages + open * a.open_stride;
  } else {
    const uint8_t* p = a.payload + int64_t(a.payload_slot ? a.payload_slot[block] : block) * a.payload_stride;
    (a.layout->k_bits == 16 ? ref.plain : ref.payload) = p;
  }
  return ref;
}

// The sealed page of a row as scoring by plane 0 reads it, also where an open copy of it exists.
KTX_INLINE const uint8_t* scoring_page(const AttentionArgs& a, int row, int index) {
  const int block = a.block_table[int64_t(row) * a.table_stride + index];
  if (a.residency && a.residency->scoring) return a.residency->scoring + block * a.residency->scoring_stride;
  return a.payload + int64_t(a.payload_slot ? a.payload_slot[block] : block) * a.payload_stride;
}

KTX_INLINE const uint8_t* plain_keys(const AttentionArgs& a, const PageRef& ref, int kv_head) {
  return ref.plain + int64_t(kv_head) * a.layout->page_size * a.layout->head_dim * dtype_bytes(a.dtype);
}
KTX_INLINE const uint8_t* plain_values(const AttentionArgs& a, const PageRef& ref, int kv_head) {
  return plain_keys(a, ref, a.layout->num_kv_heads + kv_head);
}

// One kv head's part of a sealed page.
struct HeadPage {
  Params k, v;
  const uint8_t *plane0, *plane1, *low, *v_codes;
};

KTX_INLINE const uint8_t* section(const uint8_t* payload, const Section& s, int kv_head) {
  return payload + s.offset + kv_head * s.head_bytes;
}

KTX_INLINE HeadPage head_page(const Layout& lay, const uint8_t* payload, int kv_head) {
  const auto byte = [&](const Section& s) { return section(payload, s, kv_head); };
  const auto base = [&](const Section& s) {
    return lay.scale_bits == 8 ? reinterpret_cast<const uint16_t*>(byte(s)) : nullptr;
  };
  return {{byte(lay.k_scale), byte(lay.k_min), base(lay.k_base)}, {byte(lay.v_scale), byte(lay.v_min), base(lay.v_base)},
          byte(lay.k_plane0), byte(lay.k_plane1), byte(lay.k_low), byte(lay.v_codes)};
}

// Orthonormal Walsh-Hadamard rotation of x[dim], in place; block diagonal as in kv_quant/hadamard.py. Its own inverse.
static inline void hadamard(float* x, int dim) {
  const int block = dim & -dim;  // at least 16
  for (int i = 0; i < dim; i += W) {
    vf y = butterfly<4>(butterfly<2>(butterfly<1>(load(x + i))));
    if (W == 16) y = butterfly<8>(y);
    store(x + i, y);
  }
  for (int half = W; half < block; half *= 2)
    for (int i = 0; i < dim; i += 2 * half)
      for (int j = i; j < i + half; j += W) {
        const vf low = load(x + j), high = load(x + j + half);
        store(x + j, low + high);
        store(x + j + half, low - high);
      }
  const vf norm = set1(float(1. / __builtin_sqrt(double(block))));
  for (int i = 0; i < dim; i += W) store(x + i, load(x + i) * norm);
}

template <int V>
struct Const { static constexpr int value = V; };

// f(Const<0>{}), f(Const<1>{}) .. f(Const<N - 1>{}), written out, so that shifts and register choices are constants.
template <int N, class F>
KTX_INLINE void unroll(F&& f) {
  if constexpr (N > 0) {
    unroll<N - 1>(f);
    f(Const<N - 1>{});
  }
}
#define KTX_LAMBDA __attribute__((always_inline))

// Calls f with the dtype as a constant: `with_dtype(dtype, [&](auto dt) { load_as<dt.value>(...); })`.
template <class F>
KTX_INLINE void with_dtype(int dtype, F f) {
  if (dtype == kF32) f(Const<kF32>{});
  else if (dtype == kF16) f(Const<kF16>{});
  else f(Const<kBF16>{});
}

}  // namespace KTX_NS
