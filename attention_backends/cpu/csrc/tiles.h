// Fills the key and value tiles of prefill from sealed pages, open pages and fresh rows, as the strips of words that
// gemm.h multiplies: keys [d][token], values [token][d]. Sealed values stay rotated, as they are stored.
//
// Where a word holds two numbers, plain keys pair channels (2i, 2i + 1); sealed keys pair (0, 2) and (1, 3) of each
// four, which is how a 16-bit lane of the packed planes holds them. Queries are packed to match.
//
// Integer words: a key is center + key_step * word, by channel; a value is token_min + token_scale * word, so that
// codes with a scale a token or head are words as they are.
#pragma once
#include "gemm.h"

namespace KTX_NS {

constexpr int kTile = W == 16 ? 128 : 64;  // tokens a tile: one row's scores fit in registers
constexpr float kWordNorm = 46300;         // of two rounded vectors of at most kMaxDim words: their product is an int32

template <class Mac>
struct Tiles {
  float *keys, *values;
  int dim;
  float *center, *token_scale, *token_min;  // [dim], [kTile], [kTile]: of integer words
  float key_step, weight_words;  // the latter: the largest of a row's weights

  static int64_t words(int dim) { return int64_t(kTile) * ((dim + kStrip - 1) / kStrip * kStrip) / Mac::kPack; }
  int key_words() const { return dim / Mac::kPack; }
  int64_t key_strip() const { return int64_t(key_words()) * kStrip; }
  static constexpr int64_t value_strip() { return kTile / Mac::kPack * kStrip; }
  float* key(int word, int token) const { return keys + token / kStrip * key_strip() + word * kStrip + token % kStrip; }
  float* value(int token, int channel) const {
    return values + channel / kStrip * value_strip() + token / Mac::kPack * kStrip + channel % kStrip;
  }
};

// f(Const<0>{}) .. f(Const<7>{}): the eight nibbles of a 32-bit lane as compile-time shifts.
template <class F>
KTX_INLINE void each_nibble(F f) {
  f(Const<0>{}), f(Const<1>{}), f(Const<2>{}), f(Const<3>{});
  f(Const<4>{}), f(Const<5>{}), f(Const<6>{}), f(Const<7>{});
}

// Scales and minima that a fill reads, in fp32: by channel one row [dim]; by token, keys [column][kTile] and values
// [token][column] from the fill's first token on; by head one.
struct TileScales {
  static constexpr int kEntries = kMaxDim / 32 * kTile;
  alignas(64) float scale[kEntries], minimum[kEntries];

  KTX_MEMBER Affine one(int i) const { return {set1(scale[i]), set1(minimum[i])}; }  // for all lanes
  KTX_MEMBER Affine vector(int i) const { return {load(scale + i), load(minimum + i)}; }
};

// The key codes of W tokens and channels 4*d4 + 0..3 + k*D/4 of all four k, as nibbles: `even` holds k = 0 (low) and
// 2 (high nibble) of each byte, `odd` k = 1 and 3; the `low` words continue INT8 codes in the same places.
struct KeyNibbles {
  vi even, odd, low_even, low_odd;
};

KTX_INLINE KeyNibbles key_nibbles(const Layout& lay, const HeadPage& page, int d4, int token) {
  const int64_t at = (int64_t(d4) * lay.page_size + token) * 4;
  const vi p0 = iload(page.plane0 + at), p1 = iload(page.plane1 + at), upper = iset1(int32_t(0xCCCCCCCCu));
  KeyNibbles n{pick(upper, sll<2>(p0), p1), pick(upper, p0, srl<2>(p1)), iset1(0), iset1(0)};
  if (lay.k_bits == 8) {
    n.low_even = iload(page.low + at);
    n.low_odd = iload(page.low + at + int64_t(lay.head_dim / 16) * lay.page_size * 4);
  }
  return n;
}

template <int BITS, int N>
KTX_INLINE vf key_code(vi high, vi low) {
  const vf code = nibble(srl<4 * N>(high));
  return BITS == 8 ? fmadd(code, set1(16.f), nibble(srl<4 * N>(low))) : code;
}

// The step that makes words of x[dim], or of any vector that is nowhere larger; NaN where x isn't finite.
[[maybe_unused]] static float word_step(const float* x, int dim) {
  vf top = zero(), sum = zero(), zeros = zero();
  for (int c = 0; c < dim; c += W) {
    const vf y = load(x + c);
    top = vmax(as_float(iand(as_int(y), iset1(0x7FFFFFFF))), top);
    zeros = fmadd(y, zero(), zeros);
  }
  if (hsum(zeros) != 0) return __builtin_nanf("");
  const float most = hmax(top);
  if (most < 1e-30f) return 0;
  for (int c = 0; c < dim; c += W) {
    const vf y = load(x + c) * set1(1.f / most);
    sum = fmadd(y, y, sum);
  }
  return most * max_of(1.f / 32700, __builtin_sqrtf(hsum(sum)) * (1.f / kWordNorm));
}
KTX_INLINE float inverse_of(float step) { return step > 0 ? 1.f / step : 0.f; }

// Words of two int16 from two int32 vectors.
KTX_INLINE vi pair_words(vi first, vi second) { return pick(iset1(0xFFFF), first, sll<16>(second)); }

// Two int32 vectors as int16 in order.
KTX_INLINE vi narrow(vi first, vi second) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi32(first, second));
#elif defined(__AVX2__)
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xD8);
#else
  return ieach([=](int i) {
    const vi x = i < W / 2 ? first : second;
    return (x[2 * i % W] & 0xFFFF) | x[2 * i % W + 1] << 16;
  });
#endif
}

// Scales and minima of keys by channel (all the same for scales by head), relative to the tile's center, in its steps.
struct KeyAffine {
  alignas(64) float scale[kMaxDim], minimum[kMaxDim];

  template <class Mac>
  KeyAffine(const Layout& lay, const TileScales& scales, const Tiles<Mac>& t) {
    const vf inverse = set1(Mac::kIntegers ? inverse_of(t.key_step) : 1.f);
    for (int c = 0; c < t.dim; c += W) {
      const Affine a = lay.k_method == kPerChannel ? scales.vector(c) : scales.one(0);
      store(scale + c, a.scale * inverse);
      store(minimum + c, Mac::kIntegers ? (a.minimum - load(t.center + c)) * inverse : a.minimum);
    }
  }
  KTX_MEMBER Affine operator[](int channel) const { return {set1(scale[channel]), set1(minimum[channel])}; }
};

#if defined(__AVX512F__)

// All 16 dequantized values of two INT4 scales as one vpermw table: entries 0..15 of the first, 16..31 of the second.
KTX_INLINE vi pair_table(Affine first, Affine second) {
  const vf codes = to_float(lane_index());
  const __m256i low = _mm512_cvtepi32_epi16(to_int(first(codes))), high = _mm512_cvtepi32_epi16(to_int(second(codes)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
// Looks up the low nibble of each lane's lower half in the table's first 16 entries, of its upper half in the others.
KTX_INLINE vf look_up(vi table, vi codes) {
  const vi index = pick(iset1(0x000F000F), codes, iset1(0x00100000));
  return as_float(_mm512_permutexvar_epi16(index, table));
}

// Keys of one page, INT4 with one scale a channel or head: 16 tokens x 2 channels a lookup.
static void fill_keys_by_table(const Layout& lay, const HeadPage& page, const TileScales& scales, int token, int count,
                               const Tiles<MacWords>& t, int at) {
  const int dim = lay.head_dim;
  const KeyAffine own(lay, scales, t);
  for (int d4 = 0; d4 < dim / 16; d4++) {
    vi tables[8];  // [k][0: channels 0 and 2, 1: channels 1 and 3]
    for (int i = 0; i < 8; i++) {
      const int c = 4 * d4 + i % 2 + i / 2 * dim / 4;
      tables[i] = pair_table(own[c], own[c + 2]);
    }
    for (int i = 0; i < count; i += W) {
      const KeyNibbles n = key_nibbles(lay, page, d4, token + i);
      float* out = t.key(2 * d4, at + i);
      const int64_t k_step = int64_t(dim / 8) * kStrip;
      const auto put = [&](int k, vi low, vi high) {
        store(out + k * k_step, look_up(tables[2 * k], low));
        store(out + k * k_step + kStrip, look_up(tables[2 * k + 1], high));
      };
      put(0, n.even, srl<8>(n.even));
      put(1, n.odd, srl<8>(n.odd));
      put(2, srl<4>(n.even), srl<12>(n.even));
      put(3, srl<4>(n.odd), srl<12>(n.odd));
    }
  }
}

#endif

// Keys of one page, W tokens at once, for every method.
template <class Mac, int BITS, bool BY_TOKEN>
static void fill_keys_as(const Layout& lay, const HeadPage& page, const TileScales& scales, int token, int count,
                         const Tiles<Mac>& t, int at) {
  const int dim = lay.head_dim;
  const KeyAffine by_channel(lay, scales, t);
  const vf inverse = set1(Mac::kIntegers ? inverse_of(t.key_step) : 1.f);
  for (int i = 0; i < count; i += W) {
    for (int d4 = 0; d4 < dim / 16; d4++) {
      const KeyNibbles n = key_nibbles(lay, page, d4, token + i);
      Affine by_token[4];  // four channels side by side share them
      for (int k = 0; BY_TOKEN && k < 4; k++) {
        const Affine own = scales.vector((4 * d4 + k * (dim / 4)) / lay.k_group * kTile + i);
        by_token[k] = {own.scale * inverse, own.minimum * inverse};
      }
      vf value[2][8];  // [k % 2][2 * channel + k / 2]
      each_nibble([&](auto x) {
        constexpr int kN = decltype(x)::value;
        for (int odd = 0; odd < 2; odd++) {
          const int channel = 4 * d4 + kN / 2 + (odd + 2 * (kN % 2)) * (dim / 4);
          const Affine own = BY_TOKEN ? by_token[odd + 2 * (kN % 2)] : by_channel[channel];
          value[odd][kN] = own(key_code<BITS, kN>(odd ? n.odd : n.even, odd ? n.low_odd : n.low_even));
        }
      });
      for (int k = 0; k < 4; k++) {
        const vf* v = &value[k % 2][k / 2];  // channels 0..3 at v[0], v[2], v[4], v[6]
        const int word = (4 * d4 + k * (dim / 4)) / Mac::kPack;
        if constexpr (Mac::kPack == 1) {
          for (int c = 0; c < 4; c++) store(t.key(word + c, at + i), v[2 * c]);
        } else {
          for (int c = 0; c < 2; c++)
            store(t.key(word + c, at + i), as_float(pair_words(to_int(v[2 * c]), to_int(v[2 * c + 4]))));
        }
      }
    }
  }
}

// W values of one token from channel `c` on (for INT4, whole groups of 16 channels: `part` of W of them).
template <int BITS>
KTX_INLINE vf value_code(const uint8_t* row, int c) {
  if (BITS == 8) return u8_to_float(row + c);
  const uint8_t* group = row + c / 16 * 8;
#if defined(__AVX512F__)
  int64_t x;
  std::memcpy(&x, group, 8);
  const vi twice = _mm512_cvtepu8_epi32(_mm_set1_epi64x(x));
  return nibble(_mm512_srlv_epi32(twice, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4)));
#else
  const vi bytes = load_u8(group);
  return nibble(c % 16 ? srl<4>(bytes) : bytes);
#endif
}

template <class Mac, int BITS, int METHOD>
static void fill_values_as(const Layout& lay, const HeadPage& page, const TileScales& scales, int token, int count,
                           const Tiles<Mac>& t, int at) {
  const int dim = lay.head_dim;
  const int group = METHOD == kPerToken ? lay.v_group : dim, step = METHOD == kPerToken ? dim / group : 0;
  // Scales that can't wait: values become words of 12 bits.
  const vf inverse = set1(Mac::kIntegers ? inverse_of(t.token_scale[0]) : 1.f);
  for (int i = 0; i < count; i += Mac::kPack) {
    const uint8_t* row = page.v_codes + int64_t(token + i) * dim * BITS / 8;
    for (int from = 0, column = 0; from < dim; from += group, column++) {
      Affine own = scales.one(i * step + column), second = scales.one((i + Mac::kPack - 1) * step + column);
      for (int c = from; c < from + group; c += W) {
        if (METHOD == kPerChannel) own = second = scales.vector(c);
        const vf value = own(value_code<BITS>(row, c));
        if constexpr (Mac::kIntegers) {
          const vf next = second(value_code<BITS>(row + dim * BITS / 8, c));
          store(t.value(at + i, c), as_float(pair_words(to_int(value * inverse), to_int(next * inverse))));
        } else {
          store(t.value(at + i, c), value);
        }
      }
    }
  }
}

// Codes of two tokens as words, for scales that wait in token_scale and token_min.
template <int BITS>
static void fill_value_codes(const Layout& lay, const HeadPage& page, int token, int count, const Tiles<MacWords>& t,
                             int at) {
  const int dim = lay.head_dim, bytes = dim * BITS / 8;
  for (int i = 0; i < count; i += 2) {
    const uint8_t *row = page.v_codes + int64_t(token + i) * bytes, *next = row + bytes;
    for (int c = 0; BITS == 8 && c < dim; c += W)
      store(t.value(at + i, c), as_float(ior(load_u8(row + c), sll<16>(load_u8(next + c)))));
    for (int c = 0; BITS == 4 && c < dim; c += 16) {  // 8 bytes: low nibbles are channels 0 .. 7, high ones 8 .. 15
      float* to = t.value(at + i, c);
#if defined(__AVX512F__)
      const auto twice = [](const uint8_t* p) {
        int64_t x;
        std::memcpy(&x, p, 8);
        return _mm512_cvtepu8_epi32(_mm_set1_epi64x(x));
      };
      const vi both = ior(twice(row + c / 2), sll<16>(twice(next + c / 2)));
      const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
      store(to, as_float(iand(_mm512_srlv_epi32(both, shift), iset1(0x000F000F))));
#else
      const vi both = ior(load_u8(row + c / 2), sll<16>(load_u8(next + c / 2)));
      store(to, as_float(iand(both, iset1(0x000F000F))));
      store(to + W, as_float(iand(srl<4>(both), iset1(0x000F000F))));
#endif
    }
  }
}

// Calls fill(scales, token, count, at) with the scales that these tokens have in fp32: by channel once for each group.
template <class F>
KTX_INLINE void with_scales(int method, int group, int dim, bool keys, const Params& params, int token, int count,
                            int at, F fill) {
  TileScales s;
  const Scales from(params);
  const int columns = dim / group;
  if (method == kPerChannel) {
    for (int end = token + count, some; token < end; token += some, at += some) {
      some = min_of(end, (token / group + 1) * group) - token;
      expand(from, token / group * dim, dim, s.scale, s.minimum);
      fill(s, token, some, at);
    }
    return;
  }
  if (method == kPerHead) from.read(0, s.scale, s.minimum);
  else if (!keys) expand(from, token * columns, count * columns, s.scale, s.minimum);
  else
    for (int i = 0; i < columns; i++)
      expand_column(from, i, columns, token, count, s.scale + i * kTile, s.minimum + i * kTile);
  fill(s, token, count, at);
}

// Whether one factor a token is all that its value codes need: it then waits for the weights.
KTX_INLINE bool value_scales_wait(const Layout& lay) {
  return lay.v_method == kPerHead || (lay.v_method == kPerToken && lay.v_group == lay.head_dim);
}

// What codes with these scales span on either side of `middle`, at most.
KTX_INLINE vf reach(Affine a, vf levels, vf middle) {
  const auto size = [](vf x) { return as_float(iand(as_int(x), iset1(0x7FFFFFFF))); };
  return vmax(size(a.minimum - middle), size(fmadd(a.scale, levels, a.minimum - middle)));
}

// What the keys of `count` tokens of a page span on either side of the tile's center, by channel, at most: the larger of
// that and range[dim].
template <class Mac>
static void widen(const Layout& lay, const HeadPage& page, int first, int count, const Tiles<Mac>& t, float* range) {
  const vf levels = set1(float((1 << lay.k_bits) - 1));
  count = (count + 15) / 16 * 16;
  with_scales(lay.k_method, lay.k_group, lay.head_dim, true, page.k, first, count, 0,
              [&](const TileScales& s, int, int n, int) {
    vf shared = zero();
    if (lay.k_method == kPerHead) shared = reach(s.one(0), levels, zero());
    for (int column = 0; lay.k_method == kPerToken && column < t.dim / lay.k_group; column++)
      for (int i = 0; i < n; i += W) shared = vmax(reach(s.vector(column * kTile + i), levels, zero()), shared);
    shared = set1(hmax(shared));
    for (int c = 0; c < t.dim; c += W) {
      const vf wide = lay.k_method == kPerChannel ? reach(s.vector(c), levels, load(t.center + c)) : shared;
      store(range + c, vmax(wide, load(range + c)));
    }
  });
}

// The largest value, in size, that the tokens of a page have by scales that don't wait.
[[maybe_unused]] static float largest_value(const Layout& lay, const HeadPage& page, int first, int count) {
  const vf levels = set1(float((1 << lay.v_bits) - 1));
  vf top = zero();
  with_scales(lay.v_method, lay.v_group, lay.head_dim, false, page.v, first, (count + 15) / 16 * 16, 0,
              [&](const TileScales& s, int, int n, int) {
    const int entries = lay.v_method == kPerChannel ? lay.head_dim : n * (lay.head_dim / lay.v_group);
    for (int i = 0; i < entries; i += W) top = vmax(reach(s.vector(i), levels, zero()), top);
  });
  return hmax(top);
}

template <class Mac, int BITS>
static void fill_keys(const Layout& lay, const HeadPage& page, int first, int count, const Tiles<Mac>& t, int column) {
  with_scales(lay.k_method, lay.k_group, lay.head_dim, true, page.k, first, count, column,
              [&](const TileScales& s, int token, int n, int at) {
#if defined(__AVX512F__)
    if constexpr (Mac::kIntegers && BITS == 4)
      if (lay.k_method != kPerToken) return fill_keys_by_table(lay, page, s, token, n, t, at);
#endif
    if (lay.k_method == kPerToken) fill_keys_as<Mac, BITS, true>(lay, page, s, token, n, t, at);
    else fill_keys_as<Mac, BITS, false>(lay, page, s, token, n, t, at);
  });
}

template <class Mac, int BITS>
static void fill_values(const Layout& lay, const HeadPage& page, int first, int count, const Tiles<Mac>& t,
                        int column) {
  with_scales(lay.v_method, lay.v_group, lay.head_dim, false, page.v, first, count, column,
              [&](const TileScales& s, int token, int n, int at) {
    if constexpr (Mac::kIntegers)
      if (value_scales_wait(lay)) {
        for (int i = 0; i < n; i += W) {
          const Affine own = lay.v_method == kPerToken ? s.vector(i) : s.one(0);
          store(t.token_scale + at + i, own.scale), store(t.token_min + at + i, own.minimum);
        }
        return fill_value_codes<BITS>(lay, page, token, n, t, at);
      }
    if (lay.v_method == kPerChannel) fill_values_as<Mac, BITS, kPerChannel>(lay, page, s, token, n, t, at);
    else if (lay.v_method == kPerToken) fill_values_as<Mac, BITS, kPerToken>(lay, page, s, token, n, t, at);
    else fill_values_as<Mac, BITS, kPerHead>(lay, page, s, token, n, t, at);
  });
}

// Tokens [token, token + count) of a sealed page to tile column `at`; whole groups of 16 tokens are written (a page has
// them), so the tail of the last group is defined, and to be masked.
template <class Mac>
static void fill_sealed(const Layout& lay, const HeadPage& page, int token, int count, const Tiles<Mac>& t, int at) {
  count = (count + 15) / 16 * 16;
  if (lay.k_bits == 4) fill_keys<Mac, 4>(lay, page, token, count, t, at);
  else fill_keys<Mac, 8>(lay, page, token, count, t, at);
  if (lay.v_bits == 4) fill_values<Mac, 4>(lay, page, token, count, t, at);
  else fill_values<Mac, 8>(lay, page, token, count, t, at);
}

// ---- plain rows in the model's dtype ------------------------------------------------------------------------------

KTX_INLINE void transpose8(const float* const rows[8], int from, float* to) {  // to[8][kStrip] = rows[8][from ..]^T
#if defined(__AVX2__)
  __m256 r[8], u[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[i] + from);
  for (int i = 0; i < 4; i++) {
    u[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    u[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(u[4 * i], u[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(u[4 * i], u[4 * i + 2], 0xEE);
    r[4 * i + 2] = _mm256_shuffle_ps(u[4 * i + 1], u[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(u[4 * i + 1], u[4 * i + 3], 0xEE);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * kStrip, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * kStrip, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[i * kStrip + j] = rows[j][from + i];
#endif
}

// `count` rows of keys, `stride` elements apart, to tile column `at`; up to the next multiple of 8 the last repeats.
template <class Mac, int DT>
static void fill_plain_keys(const void* keys, int64_t stride, int count, const Tiles<Mac>& t, int at) {
  float converted[8][512];
  const float* rows[8];
  for (int i = 0; i < count; i += 8) {
    for (int j = 0; j < 8; j++) {
      const int64_t from = min_of(i + j, count - 1) * stride;
      if (Mac::kPack == 2 || DT == kF32) {
        rows[j] = reinterpret_cast<const float*>(static_cast<const char*>(keys) + from * (DT == kF32 ? 4 : 2));
      } else {
        for (int d = 0; d < t.dim; d += W) store(converted[j] + d, load_as<DT>(keys, from + d));
        rows[j] = converted[j];
      }
    }
    for (int word = 0; word < t.key_words(); word += 8) transpose8(rows, word, t.key(word, at + i));
  }
}

// Likewise values; an odd last row of bf16 pairs is paired with zeros. Returns whether all of them are finite.
template <class Mac, int DT>
static bool fill_plain_values(const void* values, int64_t stride, int count, const Tiles<Mac>& t, int at) {
  vf check = zero();  // x - x is 0 for finite x, else NaN, and NaN stays
  for (int i = 0; i < count; i += Mac::kPack)
    for (int d = 0; d < t.dim; d += W) {
      const vf first = load_as<DT>(values, i * stride + d);
      vf word = first;
      check = check + (first - first);
      if constexpr (Mac::kPack == 2) {
        const vf second = i + 1 < count ? load_as<DT>(values, (i + 1) * stride + d) : zero();
        check = check + (second - second);
        word = as_float(ior(as_int(second), srl<16>(as_int(first))));
      }
      store(t.value(at + i, d), word);
    }
  return hsum(check) == 0.f;
}

}  // namespace KTX_NS
