// Scales and minima of a sealed page, however they are stored (kv_quant/scale_methods.py): fp16 numbers, or bytes.
//
// Methods differ in what shares an entry. By channel: `group` tokens (all, or 32) of one channel, entries [row][dim].
// By token: `group` channels (all, or 32) of one token, entries [token][column]. By head: all, one entry.
#pragma once
#include "simd.h"

namespace KTX_NS {

// Of one side of a kv head. `base`: unit of scales, least minimum, unit of minima, fp16; null where entries are fp16.
struct Params {
  const uint8_t *scale, *minimum;
  const uint16_t* base;
};

KTX_INLINE void prefetch_params(const ktx::Section& s, const Params& p) {
  if (p.base) __builtin_prefetch(p.base, 0, 3);
  prefetch_run(p.scale, s.head_bytes), prefetch_run(p.minimum, s.head_bytes);
}

// What codes are worth.
struct Affine {
  vf scale, minimum;
  inline __attribute__((always_inline)) vf operator()(vf code) const { return fmadd(code, scale, minimum); }
};

// Entries as fp32, from `first` on. unit * byte is exact there, so fused or not, a minimum is rounded once.
struct Scales {
  const uint8_t *scale, *minimum;
  bool bytes;
  float unit = 0, least = 0, min_unit = 0;

  inline __attribute__((always_inline)) explicit Scales(const Params& p, int first = 0) : bytes(p.base) {
    const int step = bytes ? first : 2 * first;
    scale = p.scale + step, minimum = p.minimum + step;
    if (bytes) unit = f16_to_f32(p.base[0]), least = f16_to_f32(p.base[1]), min_unit = f16_to_f32(p.base[2]);
  }

  inline __attribute__((always_inline)) Affine vector(int i) const {  // entries i .. i + W
    if (bytes)
      return {u8_to_float(scale + i) * set1(unit), fmadd(u8_to_float(minimum + i), set1(min_unit), set1(least))};
    return {load_f16(reinterpret_cast<const uint16_t*>(scale) + i),
            load_f16(reinterpret_cast<const uint16_t*>(minimum) + i)};
  }
  inline __attribute__((always_inline)) void read(int i, float* to_scale, float* to_minimum) const {
    if (bytes) *to_scale = unit * scale[i], *to_minimum = least + min_unit * minimum[i];
    else *to_scale = f16_to_f32(reinterpret_cast<const uint16_t*>(scale)[i]),
         *to_minimum = f16_to_f32(reinterpret_cast<const uint16_t*>(minimum)[i]);
  }
  inline __attribute__((always_inline)) Affine one(int i) const {  // entry i in all lanes
    float s, m;
    read(i, &s, &m);
    return {set1(s), set1(m)};
  }
};

// Entries as arrays of fp32: `count` (rounded up to W, which must lie in the page) from `first` on.
static void expand(const Scales& s, int first, int count, float* scale, float* minimum) {
  for (int i = 0; i < count; i += W) {
    const Affine a = s.vector(first + i);
    store(scale + i, a.scale), store(minimum + i, a.minimum);
  }
}
// One column of `columns`, tokens from .. from + count.
static void expand_column(const Scales& s, int column, int columns, int from, int count, float* scale, float* minimum) {
  if (columns == 1) return expand(s, from, count, scale, minimum);
  for (int t = 0; t < count; t++) s.read((from + t) * columns + column, scale + t, minimum + t);
}

}  // namespace KTX_NS
