// Attention of many queries at once: a block of query tokens times the query heads of one kv head share each tile of
// keys and values, which is dequantized once and multiplied by gemm.h, with an online softmax in between.
//
// Order: sealed pages first, whose values are in rotated space; the accumulators are un-rotated once; then pages in the
// model's dtype, then the fresh rows up to the diagonal. A query's result depends on its own row of the batch alone:
// tiles start at fixed places whatever block of queries is at work, and hidden keys add exact zeros.
#pragma once
#include "blocks.h"
#include "tiles.h"

namespace KTX_NS {

constexpr int kPanel = 4 * kRows;  // rows whose scores stay in the first-level cache between the two products
constexpr int kTileVectors = kTile / W;

// 2^x for x <= 0, at least 2^-126; NaN stays. DEGREE 3: 1e-4 relative, enough before rounding to bf16; 5: 2e-7.
template <int DEGREE>
KTX_INLINE vf exp2_below_one(vf x) {
  x = vmax(set1(-126.f), x);
  const vf n = round_even(x), f = x - n;
  vf p;
  if (DEGREE == 3) {
    p = fmadd(f, set1(5.5171669e-2f), set1(2.4261113e-1f));
    p = fmadd(p, f, set1(6.9326099e-1f));
    p = fmadd(p, f, set1(9.9992520e-1f));
  } else {
    p = fmadd(f, set1(1.3333558e-3f), set1(9.6181291e-3f));
    p = fmadd(p, f, set1(5.5504109e-2f));
    p = fmadd(p, f, set1(2.4022651e-1f));
    p = fmadd(p, f, set1(6.9314718e-1f));
    p = fmadd(p, f, set1(1.f));
  }
  return scale_by_power(p, n);
}

template <class Mac>
struct Prefill {
  const AttentionArgs& a;
  const Layout& lay;
  int row, kv_head, q_begin, q_end;  // tokens of the row
  int dim, group, rows;              // rows: query tokens x heads of the group, then padding to whole panels
  float *query, *acc, *peak, *total, *keep, *scores, *weights;
  Tiles<Mac> tiles;
  float* center_words;  // tiles.center as sealed queries are packed
  float exponent;       // scores times this are powers of two
  bool centered = false;

  static int padded_rows(int rows) { return (rows + kRows - 1) / kRows * kRows; }
  static int64_t state_floats(int rows, int dim) { return int64_t(padded_rows(rows)) * (2 * dim + W + 1); }

  // `state` [state_floats()]: what lasts from tile to tile.
  Prefill(const AttentionArgs& args, int row_, int head, int begin, int end, float* state, Workspace& w)
      : a(args), lay(*args.layout), row(row_), kv_head(head), q_begin(begin), q_end(end), dim(lay.head_dim),
        group(a.num_q_heads / lay.num_kv_heads), rows(padded_rows((end - begin) * group)) {
    query = state;
    acc = query + int64_t(rows) * dim;
    total = acc + int64_t(rows) * dim;
    peak = total + int64_t(rows) * W;
    const int64_t words = Tiles<Mac>::words(dim);
    tiles = {w.get<float>(kPrefill2, 2 * words + kPanel * (2 * kTile + 1) + 2 * dim), nullptr, nullptr, dim};
    tiles.values = tiles.keys + words;
    scores = tiles.values + words;
    weights = scores + kPanel * kTile;
    tiles.center = weights + kPanel * kTile;
    center_words = tiles.center + dim;
    keep = center_words + dim;
    exponent = 1.44269504f * (a.softcap > 0 ? 1.f : a.scale);
  }

  void reset() {
    for (int64_t i = 0; i < int64_t(rows) * dim; i++) acc[i] = 0;
    for (int64_t i = 0; i < int64_t(rows) * W; i++) total[i] = 0;
    for (int i = 0; i < rows; i++) peak[i] = kNegInf;
  }

  int64_t element(int64_t token, int g, int64_t token_stride) const {  // of query head g of the group
    return (a.cu_q[row] + token) * token_stride + int64_t(kv_head * group + g) * dim;
  }

  // Queries as words, [rows][key_words]; `sealed`: channels in the order of sealed keys.
  template <int DT>
  void pack_queries(bool sealed) {
    const int words = tiles.key_words();
    for (int i = 0; i < rows; i++) {
      float* to = query + int64_t(i) * words;
      if (i >= (q_end - q_begin) * group) {
        std::memset(to, 0, sizeof(float) * words);
        continue;
      }
      const int64_t from = element(q_begin + i / group, i % group, a.q_token_stride);
      if (Mac::kPack == 1) {
        for (int d = 0; d < dim; d += W) store(to + d, load_as<DT>(a.q, from + d));
        continue;
      }
      const uint16_t* h = static_cast<const uint16_t*>(a.q) + from;
      uint16_t* pairs = reinterpret_cast<uint16_t*>(to);
      std::memcpy(pairs, h, 2 * dim);
      for (int d = 0; sealed && d < dim; d += 4) pairs[d + 1] = h[d + 2], pairs[d + 2] = h[d + 1];
    }
  }

  // One row of scores over `limit` of the tile's `count` tokens -> weights, running peak and sum, and in keep[] what
  // the sums so far are worth in terms of the new peak.
  void softmax_row(int i, int panel_row, int count, int limit) {
    const float* from = scores + panel_row * kTile;
    const int vectors = (count + W - 1) / W;
    vf s[kTileVectors];
    if (limit == kTile) {
      for (int j = 0; j < kTileVectors; j++) s[j] = load(from + j * W);
    } else {
      for (int j = 0; j < vectors; j++) s[j] = first_lanes(limit - j * W, load(from + j * W), set1(kNegInf));
      for (int j = vectors; j < kTileVectors; j++) s[j] = set1(kNegInf);
    }
    if (a.softcap > 0)
      for (vf& x : s) x = set1(a.softcap) * vtanh(x * set1(a.scale / a.softcap));
    softmax_finish(s, i, panel_row, limit);
  }

  KTX_INLINE bool any_above(vf x, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
    return hmax(x) > bound;
#endif
  }

  void softmax_finish(vf (&s)[kTileVectors], int i, int panel_row, int limit) {
    vf top = s[0];
    for (int j = 1; j < kTileVectors; j++) top = vmax(top, s[j]);
    keep[panel_row] = 1.f;
    vf sum = load(total + i * W);
    if (any_above(top, peak[i])) {  // rare once some tiles have passed
      const float fresh = hmax(top);
      const float ratio = peak[i] == kNegInf ? 0.f : __builtin_exp2f((peak[i] - fresh) * exponent);
      keep[panel_row] = ratio;
      sum = sum * set1(ratio);
      peak[i] = fresh;
    }
    const vf base = set1(peak[i] == kNegInf ? 0.f : -peak[i] * exponent);
    for (int j = 0; j < kTileVectors; j++) {
      s[j] = exp2_below_one<Mac::kPack == 2 ? 3 : 5>(fmadd(s[j], set1(exponent), base));
      if (limit < kTile) s[j] = first_lanes(limit - j * W, s[j], zero());
      sum = sum + s[j];
    }
    store(total + i * W, sum);
    put_weights(s, panel_row);
  }

  KTX_MEMBER void put_weights(const vf (&s)[kTileVectors], float* to) {
    if constexpr (Mac::kPack == 1) {
      for (int j = 0; j < kTileVectors; j++) store(to + j * W, s[j]);
    } else {
#if defined(KTX_HAS_BF16_DOT)
      for (int j = 0; j < kTileVectors; j += 2)
        store(to + j * W / 2, as_float((vi)_mm512_cvtne2ps_pbh(s[j + 1], s[j])));
#endif
    }
  }
  void put_weights(const vf (&s)[kTileVectors], int panel_row) {
    put_weights(s, weights + panel_row * (kTile / Mac::kPack));
  }

  // Tokens of the tile that row i sees: all `count` of context; of fresh tokens, from `first` on, those up to its own.
  int limit_of(int i, int count, int first) const {
    if (first < 0) return count;
    return max_of(0, min_of(count, q_begin + i / group - first + 1));
  }

  static float dot(const float* x, const float* y, int words) {
    vf sum = zero();
    int i = 0;
    for (; i + W <= words; i += W) sum = Mac::step(sum, load(x + i), load(y + i));
    if (i < words) {
      const auto rest = [&](const float* z) { return first_lanes(words - i, load(z + i), zero()); };
      sum = Mac::step(sum, rest(x), rest(y));
    }
    return hsum(sum);
  }

  void set_center(const HeadPage& page) {
    centered = find_center(lay, page, tiles);
    uint16_t* pairs = reinterpret_cast<uint16_t*>(center_words);
    for (int d = 0; centered && d < dim; d += 4)
      for (int i = 0; i < 4; i++) pairs[d + i] = f32_to_bf16(tiles.center[d + (i == 1 ? 2 : i == 2 ? 1 : i)]);
  }

  // All rows against the filled tile. `first`: the fresh token of column 0, or -1 for context.
  void tile(int count, int first, bool finite) {
    const int columns = (count + W - 1) / W * W, words = tiles.key_words();
    float bias[kPanel] = {};
    for (int i = 0; i < rows; i += kPanel) {
      const int size = min_of(kPanel, rows - i);
      if (limit_of(i + size - 1, count, first) == 0) continue;
      const float* q = query + int64_t(i) * words;
      if (centered)
        for (int r = 0; r < size; r++) bias[r] = dot(q + r * words, center_words, words);
      multiply<Mac, false>(q, words, tiles.keys, tiles.key_strip(), words, scores, kTile, size, columns, bias);
      for (int r = 0; r < size; r++) softmax_row(i + r, r, count, limit_of(i + r, count, first));
      float* out = acc + int64_t(i) * dim;
      if (finite || limit_of(i, count, first) == count)
        multiply<Mac, true>(weights, kTile / Mac::kPack, tiles.values, tiles.value_strip(),
                            (count + Mac::kPack - 1) / Mac::kPack, out, dim, size, dim, keep);
      else
        for (int r = 0; r < size; r++) add_visible(out + int64_t(r) * dim, r, limit_of(i + r, count, first));
    }
  }

  // The second product for a diagonal tile with NaN or infinite values: 0 * NaN must not reach who doesn't see it.
  void add_visible(float* out, int r, int limit) {
    const float* weight = weights + r * (kTile / Mac::kPack);
    for (int d = 0; d < dim; d++) out[d] *= keep[r];
    for (int t = 0; t < limit; t++)
      for (int d = 0; d < dim; d++) {
        const float word = *tiles.value(t, d);
        const float w = Mac::kPack == 1 ? weight[t] : bf16_to_f32(uint16_t(bits_of(weight[t / 2]) >> 16 * (t % 2)));
        out[d] += w * (Mac::kPack == 1 ? word : bf16_to_f32(uint16_t(bits_of(word) >> 16 * (t % 2))));
      }
  }

  // The context: `pages[0 .. n)`, all sealed or all plain. Pages smaller than a tile share one, larger ones are cut.
  template <int DT>
  void context(const PageRef* pages, int n) {
    int filled = 0;
    for (int p = 0; p < n; p++) {
      for (int from = 0; from < pages[p].tokens;) {
        const int count = min_of(kTile - filled, pages[p].tokens - from);
        if (pages[p].payload) {
          const HeadPage page = head_page(lay, pages[p].payload, kv_head);
          if (filled == 0) set_center(page);
          fill_sealed(lay, page, from, count, tiles, filled);
        } else {
          const int64_t offset = int64_t(from) * dim * dtype_bytes(DT);
          fill_plain_keys<Mac, DT>(plain_keys(a, pages[p], kv_head) + offset, dim, count, tiles, filled);
          fill_plain_values<Mac, DT>(plain_values(a, pages[p], kv_head) + offset, dim, count, tiles, filled);
        }
        filled += count;
        from += count;
        // A partial page closes the tile: the next one must start at a multiple of 16.
        if (filled == kTile || filled % 16) tile(filled, -1, true), filled = 0;
      }
    }
    if (filled) tile(filled, -1, true);
  }

  template <int DT>
  void fresh() {
    const int64_t stride = a.kv_token_stride, head = int64_t(kv_head) * dim;
    for (int first = 0; first < q_end; first += kTile) {
      const int count = min_of(kTile, q_end - first);
      const int64_t offset = ((a.cu_q[row] + first) * stride + head) * dtype_bytes(DT);
      fill_plain_keys<Mac, DT>(static_cast<const char*>(a.k) + offset, stride, count, tiles, 0);
      const bool finite = fill_plain_values<Mac, DT>(static_cast<const char*>(a.v) + offset, stride, count, tiles, 0);
      tile(count, first, finite);
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
    pack_queries<DT>(lay.k_bits != 16);
  }

  template <int DT>
  void end(const PageRef* open, int n, bool any_sealed) {
    if (any_sealed && lay.v_rotate)
      for (int i = 0; i < rows; i++) hadamard(acc + int64_t(i) * dim, dim);
    centered = false;
    if (lay.k_bits != 16 && Mac::kPack > 1) pack_queries<DT>(false);
    context<DT>(open, n);
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
#if defined(KTX_HAS_BF16_DOT)
      // Twice the speed of fp32 at a rounding error like that of the bf16 output; some AVX-512 CPUs lack it.
      if constexpr (dt.value == kBF16)
        if (__builtin_cpu_supports("avx512bf16")) {
          Prefill<MacBF16> prefill(a, row, kv_head, q_begin, q_end, state, w);
          return f(prefill, dt);
        }
#endif
      Prefill<MacF32> prefill(a, row, kv_head, q_begin, q_end, state, w);
      f(prefill, dt);
    });
  }

  // Pages from .. to of the list; `pages` has room for them.
  template <class P, class DT>
  void attend(const AttentionArgs& a, P& prefill, DT dt, int from, int to, PageRef* pages) const {
    for (int i = from; i < to; i++) pages[i - from] = page_at(a, row, list[i]);
    prefill.template context<dt.value>(pages, to - from);
  }

  template <class P, class DT>
  void end(const AttentionArgs& a, P& prefill, DT dt, PageRef* pages) const {
    for (int i = num_sealed; i < num_pages; i++) pages[i - num_sealed] = page_at(a, row, list[i]);
    prefill.template end<dt.value>(pages, num_pages - num_sealed, num_sealed > 0);
  }

  int64_t state_floats(const AttentionArgs& a) const {
    const int rows = (q_end - q_begin) * (a.num_q_heads / a.layout->num_kv_heads);
    return Prefill<MacF32>::state_floats(rows, a.layout->head_dim);
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
