// Attention of many queries at once: a block of query tokens times the query heads of one kv head share each tile of
// keys and values, which is dequantized once and multiplied by gemm.h, with an online softmax in between.
//
// Order: sealed pages first, whose values are in rotated space; the accumulators are un-rotated once; then pages in the
// model's dtype, then the fresh rows up to the diagonal. A query's result depends on its own row of the batch alone:
// tiles start at fixed places whatever block of queries is at work, and hidden keys add exact zeros.
//
// Sealed pages of bf16 models are multiplied as int16 numbers, which err about as bf16 does and, with AVX2, take two
// thirds of fp32's time: queries rounded with a step a row, keys with one a tile, weights a row and tile; value codes as
// they are. Fresh rows too, with a step for each token's values, where there is no bf16 product.
#pragma once
#include <type_traits>

#include "blocks.h"
#include "tiles.h"

namespace KTX_NS {

constexpr int kPanel = 4 * kRows;  // rows whose scores stay in the first-level cache between the two products
constexpr int kTileVectors = kTile / W;

// 2^x for x <= 0, at least about 2^-126; NaN stays. DEGREE 3: 1e-4 relative, enough before rounding to bf16; 5: 1e-7.
template <int DEGREE>
KTX_INLINE vf exp2_below_one(vf x) {
  if (W == 8) x = vmax(set1(-126.f), x);
  const vf f = fraction(x);
  vf p;
  if (DEGREE == 3) {
    p = fmadd(f, set1(7.8024111e-2f), set1(2.2606714e-1f));
    p = fmadd(p, f, set1(6.9583387e-1f));
    p = fmadd(p, f, set1(9.9992515e-1f));
  } else {
    p = fmadd(f, set1(1.87757348e-3f), set1(8.98934488e-3f));
    p = fmadd(p, f, set1(5.58263170e-2f));
    p = fmadd(p, f, set1(2.40153616e-1f));
    p = fmadd(p, f, set1(6.93153074e-1f));
    p = fmadd(p, f, set1(9.99999925e-1f));
  }
  return scale_by_power(p, W == 16 ? x : x - f);  // with AVX-512 the exponent need not be integral
}

template <class Plain, class Codes>
struct Prefill {
  static constexpr bool kFreshWords = Codes::kIntegers && Plain::kPack == 1;
  const AttentionArgs& a;
  const Layout& lay;
  int row, kv_head, q_begin, q_end;  // tokens of the row
  int dim, group, rows;              // rows: query tokens x heads of the group, then padding to whole panels
  float *query, *acc, *peak, *total, *offset, *keep, *gain, *scores, *weights;  // offset: all channels' share of minima
  float *query_step, *query_base, *reference;  // base: query times reference, a first tile's center
  float *shift, *shift_words, shift_step;      // what a tile's center is off that
  Tiles<Plain> plain;
  Tiles<Codes> codes;
  float exponent;       // scores times this are powers of two

  static int padded_rows(int rows) { return (rows + kRows - 1) / kRows * kRows; }
  static int64_t state_floats(int rows, int dim) { return int64_t(padded_rows(rows)) * (2 * dim + 2 * W + 3) + dim + W; }

  // `state` [state_floats()]: what lasts from tile to tile.
  Prefill(const AttentionArgs& args, int row_, int head, int begin, int end, float* state, Workspace& w)
      : a(args), lay(*args.layout), row(row_), kv_head(head), q_begin(begin), q_end(end), dim(lay.head_dim),
        group(a.num_q_heads / lay.num_kv_heads), rows(padded_rows((end - begin) * group)) {
    const auto take = [](float*& memory, int64_t floats) {
      float* p = memory;
      memory += floats;
      return p;
    };
    query = take(state, int64_t(rows) * dim), acc = take(state, int64_t(rows) * dim);
    total = take(state, int64_t(rows) * W), offset = take(state, int64_t(rows) * W);
    reference = take(state, dim), peak = take(state, rows);
    query_step = take(state, rows), query_base = take(state, rows);
    const int64_t words = Tiles<MacF32>::words(dim);
    float* own = w.get<float>(kPrefill2, 2 * words + kPanel * (2 * kTile + 2) + 2 * kTile + 3 * dim + 4 * W);
    plain = {take(own, words), take(own, words), dim};
    scores = take(own, kPanel * kTile), weights = take(own, kPanel * kTile);
    codes = {plain.keys, plain.values, dim, take(own, dim), take(own, kTile), take(own, kTile), 0, 0};
    shift = take(own, dim + 2 * W), shift_words = take(own, dim / 2 + W);
    keep = take(own, kPanel), gain = take(own, kPanel);
    exponent = 1.44269504f * (a.softcap > 0 ? 1.f : a.scale);
  }

  void reset() {
    for (int64_t i = 0; i < int64_t(rows) * dim; i++) acc[i] = 0;
    for (int64_t i = 0; i < int64_t(rows) * W; i++) total[i] = offset[i] = 0;
    for (int i = 0; i < rows; i++) peak[i] = kNegInf, query_base[i] = 0;
  }

  int64_t element(int64_t token, int g, int64_t token_stride) const {  // of query head g of the group
    return (a.cu_q[row] + token) * token_stride + int64_t(kv_head * group + g) * dim;
  }
  int64_t query_at(int i) const { return element(q_begin + i / group, i % group, a.q_token_stride); }
  bool is_padding(int i) const { return i >= (q_end - q_begin) * group; }

  // Queries as plain words, [rows][key_words].
  template <int DT>
  void pack_queries() {
    const int words = plain.key_words();
    for (int i = 0; i < rows; i++) {
      float* to = query + int64_t(i) * words;
      if (is_padding(i)) std::memset(to, 0, sizeof(float) * words);
      else if (Plain::kPack == 2) std::memcpy(to, static_cast<const uint16_t*>(a.q) + query_at(i), 2 * dim);
      else for (int d = 0; d < dim; d += W) store(to + d, load_as<DT>(a.q, query_at(i) + d));
    }
  }

  // x[dim], zero up to the next 2 W, as integer words of sealed channels; whole vectors are written.
  static void to_sealed_words(const float* x, float step, int dim, float* to) {
    const vf inverse = set1(inverse_of(step));
    for (int d = 0; d < dim; d += 2 * W)
      istore(to + d / 2, to_words(to_int(load(x + d) * inverse), to_int(load(x + d + W) * inverse)));
  }

  template <int DT>
  void pack_query_words() {
    alignas(64) float x[kMaxDim + 2 * W] = {};
    for (int i = 0; i < rows; i++) {  // each may overrun into the next
      for (int d = 0; d < dim; d += W) store(x + d, is_padding(i) ? zero() : load_as<DT>(a.q, query_at(i) + d));
      query_step[i] = word_step(x, dim);
      to_sealed_words(x, query_step[i], dim, query + int64_t(i) * codes.key_words());
    }
  }

  template <int DT>
  void ask_reference() {
    for (int i = 0; !is_padding(i) && i < rows; i++) {
      vf sum = zero();
      for (int c = 0; c < dim; c += W) sum = fmadd(load_as<DT>(a.q, query_at(i) + c), load(reference + c), sum);
      query_base[i] = hsum(sum);
    }
  }

  // What the words of a tile have in common: it begins at token `from` of pages[0]; `first`: of all tiles.
  template <int DT>
  void start_tile(const PageRef* pages, int n, int from, bool first) {
    const HeadPage page = head_page(lay, pages[0].payload, kv_head);
    const vf half = set1(float((1 << lay.k_bits) - 1) / 2);
    const bool own = lay.k_method == kPerChannel;  // only scales of channels tell where the middle of one is
    if (first) std::memset(reference, 0, sizeof(float) * dim);
    const Scales scales(page.k);
    const auto middle = [&](int c) KTX_LAMBDA {
      const Affine x = scales.vector(from / lay.k_group * dim + c);
      return fmadd(x.scale, half, x.minimum);
    };
    if (first && own) {
      for (int c = 0; c < dim; c += W) store(reference + c, middle(c));
      ask_reference<DT>();
    }
    std::memset(shift, 0, sizeof(float) * (dim + 2 * W));
    for (int c = 0; own && c < dim; c += W) store(shift + c, middle(c) - load(reference + c));
    shift_step = word_step(shift, dim);
    to_sealed_words(shift, shift_step, dim, shift_words);
    const vf inverse = set1(inverse_of(shift_step));
    for (int c = 0; c < dim; c += W)
      store(codes.center + c,
            fmadd(to_float(to_int(load(shift + c) * inverse)), set1(shift_step), load(reference + c)));
    float top = 0;
    for (int i = 0, at = 0; i < n && at < kTile; at += pages[i++].tokens - from, from = 0) {
      const HeadPage next = head_page(lay, pages[i].payload, kv_head);
      if (i == 0) std::memset(shift, 0, sizeof(float) * dim);
      const int count = min_of(kTile - at, pages[i].tokens - from);
      widen(lay, next, from, count, codes, shift);
      if (!value_scales_wait(lay)) top = max_of(top, largest_value(lay, next, from, count));
    }
    codes.key_step = word_step(shift, dim), codes.weight_words = value_scales_wait(lay) ? 32767 : 8191;
    for (int t = 0; !value_scales_wait(lay) && t < kTile; t++)
      codes.token_scale[t] = top / 2047, codes.token_min[t] = 0;
  }

  // Fresh keys are relative to the middle of their first tile: what a bias adds to all takes no bits.
  template <int DT>
  void start_fresh(const void* keys, int64_t stride) {
    pack_query_words<DT>();
    for (int d = 0; d < dim; d += W) {
      vf low = set1(3e38f), high = set1(-3e38f);
      for (int i = 0; i < min_of(kTile, q_end); i++) {
        const vf key = load_as<DT>(keys, i * stride + d);
        low = vmin(key, low), high = vmax(key, high);
      }
      const vf middle = (low + high) * set1(0.5f);
      store(reference + d, select_nan(middle - middle, zero(), middle));
    }
    ask_reference<DT>();
    shift_step = 0;
  }

  // `count` fresh rows as integer words, the values with a step a token; false, and nothing, if any isn't finite.
  template <int DT>
  bool fill_words(const void* keys, const void* values, int64_t stride, int count) {
    alignas(64) float x[kMaxDim + 2 * W] = {}, words[8][kMaxDim / 2 + W];
    const auto size = [](vf y) KTX_LAMBDA { return as_float(iand(as_int(y), iset1(0x7FFFFFFF))); };
    vf check = zero();
    for (int i = 0; i < count; i++) {
      vf top = zero();
      for (int d = 0; d < dim; d += W) {
        const vf key = load_as<DT>(keys, i * stride + d), value = load_as<DT>(values, i * stride + d);
        check = check + ((key - key) + (value - value));
        store(x + d, vmax(size(key - load(reference + d)), load(x + d)));
        top = vmax(size(value), top);
      }
      codes.token_scale[i] = hmax(top) / 2047, codes.token_min[i] = 0;
    }
    if (hsum(check) != 0) return false;
    codes.key_step = word_step(x, dim), codes.weight_words = 8191;
    for (int i = 0; i < count; i += 8) {
      const float* lines[8];
      for (int j = 0; j < 8; j++) {
        for (int d = 0; d < dim; d += W)
          store(x + d, load_as<DT>(keys, min_of(i + j, count - 1) * stride + d) - load(reference + d));
        to_sealed_words(x, codes.key_step, dim, words[j]);
        lines[j] = words[j];
      }
      for (int word = 0; word < codes.key_words(); word += 8) transpose8(lines, word, codes.key(word, i));
    }
    for (int i = 0; i < count; i += 2) {  // an odd last row is paired with zeros
      const int next = min_of(i + 1, count - 1);
      const vf own = set1(inverse_of(codes.token_scale[i]));
      const vf second = set1(next > i ? inverse_of(codes.token_scale[next]) : 0.f);
      for (int d = 0; d < dim; d += W)
        store(codes.value(i, d), as_float(pair_words(to_int(load_as<DT>(values, i * stride + d) * own),
                                                     to_int(load_as<DT>(values, next * stride + d) * second))));
    }
    return true;
  }

  // Queries i .. i + size times the tile's center, to base[], in whole vectors.
  void center_dots(int i, int size, float* base) const {
    const int words = codes.key_words();
    for (int r = 0; r < size; r += W) {
      vi sums[W];
      for (int j = 0; j < W; j++) {
        const float* x = query + int64_t(i + min_of(r + j, size - 1)) * words;
        sums[j] = iset1(0);
        for (int d = 0; d + W <= words; d += W) sums[j] = dot_words(sums[j], iload(x + d), iload(shift_words + d));
        if (const int rest = words % W)
          sums[j] = dot_words(sums[j], iload_first(x + words - rest, rest), iload(shift_words + words - rest));
      }
      store(base + r, fmadd(to_float(sum_each(sums)), load(query_step + i + r) * set1(shift_step),
                            load(query_base + i + r)));
    }
  }

  // One row of scores over `limit` of the tile's `count` tokens -> weights, running peak and sum, and in keep[] what
  // the sums so far are worth in terms of the new peak. A score is base + step times what the product left.
  template <class Mac>
  void softmax_row(int i, int panel_row, int count, int limit, float step, float base) {
    const float* from = scores + panel_row * kTile;
    const int vectors = (count + W - 1) / W;
    const auto score = [&](int j) KTX_LAMBDA {
      const vf x = load(from + j * W);
      return Mac::kIntegers ? to_float(as_int(x)) : x;
    };
    vf s[kTileVectors];
    if (limit == kTile) {
      for (int j = 0; j < kTileVectors; j++) s[j] = score(j);
    } else {
      for (int j = 0; j < vectors; j++) s[j] = first_lanes(limit - j * W, score(j), set1(kNegInf));
      for (int j = vectors; j < kTileVectors; j++) s[j] = set1(kNegInf);
    }
    if (a.softcap > 0) {
      for (vf& x : s) x = set1(a.softcap) * vtanh(fmadd(x, set1(step), set1(base)) * set1(a.scale / a.softcap));
      step = 1, base = 0;
    }
    softmax_finish<Mac>(s, i, panel_row, limit, step, base);
  }

  KTX_INLINE bool any_above(vf x, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_GT_OQ)) != 0;
#else
    return hmax(x) > bound;
#endif
  }

  template <class Mac>
  void softmax_finish(vf (&s)[kTileVectors], int i, int panel_row, int limit, float step, float base) {
    vf top = s[0];
    for (int j = 1; j < kTileVectors; j++) top = vmax(top, s[j]);
    top = fmadd(top, set1(step), set1(base));
    keep[panel_row] = 1.f;
    vf sum = load(total + i * W), low = load(offset + i * W), most = zero();
    if (any_above(top, peak[i])) {  // rare once some tiles have passed
      const float fresh = hmax(top);
      const float ratio = peak[i] == kNegInf ? 0.f : __builtin_exp2f((peak[i] - fresh) * exponent);
      keep[panel_row] = ratio;
      sum = sum * set1(ratio), low = low * set1(ratio);
      peak[i] = fresh;
    }
    const vf rise = set1(step * exponent), start = set1(peak[i] == kNegInf ? 0.f : (base - peak[i]) * exponent);
    for (int j = 0; j < kTileVectors; j++) {
      s[j] = exp2_below_one<Plain::kPack == 2 || Mac::kIntegers ? 3 : 5>(fmadd(s[j], rise, start));
      if (limit < kTile) s[j] = first_lanes(limit - j * W, s[j], zero());
      sum = sum + s[j];
      if constexpr (Mac::kIntegers) {
        low = fmadd(s[j], load(codes.token_min + j * W), low);
        s[j] = s[j] * load(codes.token_scale + j * W);
        most = vmax(s[j], most);
      }
    }
    store(total + i * W, sum);
    float* to = weights + panel_row * (kTile / Mac::kPack);
    if constexpr (Mac::kIntegers) {
      store(offset + i * W, low);
      const float words = codes.weight_words, largest = hmax(most);
      gain[panel_row] = largest * (1 / words);
      const vf inverse = set1(largest > 1e-30f ? words / largest : 0.f);
      for (int j = 0; j < kTileVectors; j += 2)
        istore(to + j * W / 2, narrow(to_int(s[j] * inverse), to_int(s[j + 1] * inverse)));
    } else if constexpr (Mac::kPack == 1) {
      for (int j = 0; j < kTileVectors; j++) store(to + j * W, s[j]);
    } else {
#if defined(KTX_HAS_BF16_DOT)
      for (int j = 0; j < kTileVectors; j += 2)
        store(to + j * W / 2, as_float((vi)_mm512_cvtne2ps_pbh(s[j + 1], s[j])));
#endif
    }
  }

  // Tokens of the tile that row i sees: all `count` of context; of fresh tokens, from `first` on, those up to its own.
  int limit_of(int i, int count, int first) const {
    if (first < 0) return count;
    return max_of(0, min_of(count, q_begin + i / group - first + 1));
  }

  // All rows against the filled tile. `first`: the fresh token of column 0, or -1 for context. `next`: pages to come.
  template <class Mac>
  void tile(const Tiles<Mac>& t, int count, int first, bool finite, const PageRef* next, int num_next) {
    const int columns = (count + W - 1) / W * W, words = t.key_words();
    alignas(64) float base[kPanel + W] = {};
    for (int j = count; Mac::kIntegers && j < kTile; j++) t.token_scale[j] = t.token_min[j] = 0;
    for (int i = 0; i < rows; i += kPanel) {
      const int size = min_of(kPanel, rows - i);
      if (limit_of(i + size - 1, count, first) == 0) continue;
      for (int p = 0; p < num_next; p++) fetch(next[p], i, size);
      const float* q = query + int64_t(i) * words;
      multiply<Mac, false>(q, words, t.keys, t.key_strip(), words, scores, kTile, size, columns);
      if constexpr (Mac::kIntegers) center_dots(i, size, base);
      for (int r = 0; r < size; r++)
        softmax_row<Mac>(i + r, r, count, limit_of(i + r, count, first),
                         Mac::kIntegers ? query_step[i + r] * t.key_step : 1.f, base[r]);
      float* out = acc + int64_t(i) * dim;
      if (finite || limit_of(i, count, first) == count)
        multiply<Mac, true>(weights, kTile / Mac::kPack, t.values, t.value_strip(),
                            (count + Mac::kPack - 1) / Mac::kPack, out, dim, size, dim, keep, gain);
      else
        for (int r = 0; r < size; r++) add_visible(out + int64_t(r) * dim, r, limit_of(i + r, count, first));
    }
  }

  // What a page's kv head takes, the part that falls to rows i .. i + size, into the second-level cache.
  void fetch(const PageRef& page, int i, int size) const {
    if (!page.payload) return;
    const Section* sections[] = {&lay.k_scale, &lay.k_min, &lay.k_plane0, &lay.k_plane1, &lay.k_low,
                                 &lay.v_scale, &lay.v_min, &lay.v_codes};
    for (const Section* s : sections) {
      const int64_t lines = (s->head_bytes + 63) / 64;
      const uint8_t* from = section(page.payload, *s, kv_head);
      for (int64_t line = lines * i / rows; line < lines * (i + size) / rows; line++)
        __builtin_prefetch(from + 64 * line, 0, 2);
    }
  }

  // The second product for a diagonal tile with NaN or infinite values: 0 * NaN must not reach who doesn't see it.
  void add_visible(float* out, int r, int limit) {
    const float* weight = weights + r * (kTile / Plain::kPack);
    for (int d = 0; d < dim; d++) out[d] *= keep[r];
    for (int t = 0; t < limit; t++)
      for (int d = 0; d < dim; d++) {
        const float word = *plain.value(t, d);
        const float w = Plain::kPack == 1 ? weight[t] : bf16_to_f32(uint16_t(bits_of(weight[t / 2]) >> 16 * (t % 2)));
        out[d] += w * (Plain::kPack == 1 ? word : bf16_to_f32(uint16_t(bits_of(word) >> 16 * (t % 2))));
      }
  }

  // The context: `pages[0 .. n)`, all sealed or all plain. Pages smaller than a tile share one, larger ones are cut.
  // `first`: nothing sealed came before.
  template <int DT>
  void context(const PageRef* pages, int n, bool first) {
    int filled = 0;
    for (int p = 0; p < n; p++) {
      for (int from = 0; from < pages[p].tokens;) {
        const int count = min_of(kTile - filled, pages[p].tokens - from);
        if (pages[p].payload) {
          if constexpr (Codes::kIntegers)
            if (filled == 0) start_tile<DT>(pages + p, n - p, from, first && p == 0 && from == 0);
          fill_sealed(lay, head_page(lay, pages[p].payload, kv_head), from, count, codes, filled);
        } else {
          const int64_t offset = int64_t(from) * dim * dtype_bytes(DT);
          fill_plain_keys<Plain, DT>(plain_keys(a, pages[p], kv_head) + offset, dim, count, plain, filled);
          fill_plain_values<Plain, DT>(plain_values(a, pages[p], kv_head) + offset, dim, count, plain, filled);
        }
        filled += count;
        from += count;
        // A partial page closes the tile: the next one must start at a multiple of 16.
        const bool last = p + 1 == n && from == pages[p].tokens;
        if (filled < kTile && filled % 16 == 0 && !last) continue;
        const int ahead = from < pages[p].tokens ? 0 : min_of(n - p - 1, max_of(1, kTile / lay.page_size));
        if (pages[p].payload) tile<Codes>(codes, filled, -1, true, pages + p + 1, ahead);
        else tile<Plain>(plain, filled, -1, true, nullptr, 0);
        filled = 0;
      }
    }
  }

  template <int DT>
  void fresh() {
    const int64_t stride = a.kv_token_stride, head = int64_t(kv_head) * dim;
    const auto from = [&](const void* x, int first) {
      return static_cast<const char*>(x) + ((a.cu_q[row] + first) * stride + head) * dtype_bytes(DT);
    };
    if constexpr (kFreshWords) start_fresh<DT>(from(a.k, 0), stride);
    for (int first = 0; first < q_end; first += kTile) {
      const int count = min_of(kTile, q_end - first);
      const char *k = from(a.k, first), *v = from(a.v, first);
      if constexpr (kFreshWords) {
        if (fill_words<DT>(k, v, stride, count)) {
          tile<Codes>(codes, count, first, true, nullptr, 0);
          continue;
        }
        pack_queries<DT>();
      }
      fill_plain_keys<Plain, DT>(k, stride, count, plain, 0);
      const bool finite = fill_plain_values<Plain, DT>(v, stride, count, plain, 0);
      tile<Plain>(plain, count, first, finite, nullptr, 0);
      if constexpr (kFreshWords) pack_query_words<DT>();
    }
  }

  template <int DT>
  void finish() {
    for (int i = 0; i < (q_end - q_begin) * group; i++) {
      const int64_t token = q_begin + i / group;
      const float sum = hsum(load(total + i * W));
      const vf norm = set1(sum == 0.f ? 0.f : 1.f / sum);
      const int64_t to = element(token, i % group, a.out_token_stride);
      for (int d = 0; d < dim; d += W) store_as<DT>(a.out, to + d, load(acc + int64_t(i) * dim + d) * norm);
      if (a.lse)
        a.lse[(a.cu_q[row] + token) * a.num_q_heads + kv_head * group + i % group] =
            sum == 0.f ? kNegInf : peak[i] * (exponent / 1.44269504f) + __builtin_logf(sum);
    }
  }

  // Before the first pages, and behind them: then the open ones, in the model's dtype, and the fresh rows.
  template <int DT>
  void begin() {
    reset();
    if constexpr (Codes::kIntegers)
      if (lay.k_bits != 16) return pack_query_words<DT>();
    pack_queries<DT>();
  }

  template <int DT>
  void end(const PageRef* open, int n, bool any_sealed) {
    for (int i = 0; any_sealed && i < rows; i++) {
      float* out = acc + int64_t(i) * dim;
      const vf low = set1(hsum(load(offset + i * W)));
      for (int d = 0; Codes::kIntegers && d < dim; d += W) store(out + d, load(out + d) + low);
      if (lay.v_rotate) hadamard(out, dim);
    }
    if (Codes::kIntegers && lay.k_bits != 16) pack_queries<DT>();
    context<DT>(open, n, false);
    if (a.k) fresh<DT>();
    finish<DT>();
  }
};

// A block of a row's queries (counted from the row's first) for one kv head, and the pages that it reads.
struct Block {
  int row, kv_head, q_begin, q_end;
  int32_t* list;            // pages of the context: sealed ones first, ascending, then open ones
  int num_sealed, num_pages;

  void sort_pages(const AttentionArgs& a, int n, Workspace& w) {
    int32_t* open = w.get<int32_t>(kPrefill3, n);
    num_pages = n, num_sealed = 0;
    int rest = 0;
    for (int i = 0; i < n; i++)
      if (a.open_slot[a.block_table[int64_t(row) * a.table_stride + list[i]]] < 0) list[num_sealed++] = list[i];
      else open[rest++] = list[i];
    std::memcpy(list + num_sealed, open, rest * sizeof(int32_t));
  }

  // Calls f(prefill, dtype) with the arithmetic that suits the model.
  template <class F>
  void with_prefill(const AttentionArgs& a, float* state, Workspace& w, F f) const {
    with_dtype(a.dtype, [&](auto dt) {
      // Beside large channels small ones keep fewer bits than fp16 has, but more than bf16.
      using Codes = std::conditional_t<kHasIntegers && dt.value == kBF16, MacWords, MacF32>;
#if defined(KTX_HAS_BF16_DOT)
      // Twice the speed of fp32 at a rounding error like that of the bf16 output; some AVX-512 CPUs lack it.
      if constexpr (dt.value == kBF16)
        if (__builtin_cpu_supports("avx512bf16")) {
          Prefill<MacBF16, Codes> prefill(a, row, kv_head, q_begin, q_end, state, w);
          return f(prefill, dt);
        }
#endif
      Prefill<MacF32, Codes> prefill(a, row, kv_head, q_begin, q_end, state, w);
      f(prefill, dt);
    });
  }

  // Pages from .. to of the list; `pages` has room for them.
  template <class P, class DT>
  void attend(const AttentionArgs& a, P& prefill, DT dt, int from, int to, PageRef* pages) const {
    for (int i = from; i < to; i++) pages[i - from] = page_at(a, row, list[i]);
    prefill.template context<dt.value>(pages, to - from, from == 0);
  }

  template <class P, class DT>
  void end(const AttentionArgs& a, P& prefill, DT dt, PageRef* pages) const {
    for (int i = num_sealed; i < num_pages; i++) pages[i - num_sealed] = page_at(a, row, list[i]);
    prefill.template end<dt.value>(pages, num_pages - num_sealed, num_sealed > 0);
  }

  int64_t state_floats(const AttentionArgs& a) const {
    const int rows = (q_end - q_begin) * (a.num_q_heads / a.layout->num_kv_heads);
    return Prefill<MacF32, MacF32>::state_floats(rows, a.layout->head_dim);
  }
};

// A block whose pages are all resident.
static void prefill_task(const AttentionArgs& a, int row, int kv_head, int q_begin, int q_end, Workspace& w) {
  const int all_pages = context_pages(a, row);
  Block block{row, kv_head, q_begin, q_end, w.get<int32_t>(kSparseList, all_pages + 1), 0, 0};
  BlockChoice choice(a, row, kv_head, q_begin, q_end);
  block.sort_pages(a, block_pages(choice, block.list, w), w);
  float* state = w.get<float>(kPrefill0, block.state_floats(a));
  PageRef* pages = w.get<PageRef>(kPrefill1, block.num_pages);
  block.with_prefill(a, state, w, [&](auto& prefill, auto dt) {
    prefill.template begin<dt.value>();
    block.attend(a, prefill, dt, 0, block.num_sealed, pages);
    block.end(a, prefill, dt, pages);
  });
}

}  // namespace KTX_NS
