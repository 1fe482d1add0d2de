// Attention of a few query vectors of one kv head over a list of pages: the flash-decoding half of `ktx_attention`.
// All vectors of a group (NR of them: query heads that share the kv head, and the queries of a short row) share each
// unpacked code. A split of at most kSplitPages pages first takes all scores, so its softmax needs no rescaling, then
// the values. Keys: lanes are tokens. Values: lanes are channels, in the order in which the bytes unpack.
#pragma once
#include "keys.h"
#include "values.h"

namespace KTX_NS {

// Sums of one split, per vector: codes in the order they unpack, codes in natural order, values that need no rotation.
struct SplitSums {
  float *permuted, *natural, *plain, *scratch, *offset;  // [NR][kQueryStride]; offset: [NR], the minima's share
};

template <int NR, int BITS>
static void add_codes(bool integer, const uint8_t* codes, const uint8_t* next, int size, int tokens, int row, int dim,
                      const float* w, float* natural, float* permuted, float* extra) {
  if (integer) {
    WordWeights<NR> words;
    round_weights(words, w, size);
    integer_values<NR, BITS>(codes, next, tokens, row, dim, words, permuted);
    // As for keys: codes average half their range, so what rounding took comes back as that constant.
    for (int r = 0; r < NR; r++) extra[r] = words.lost[r] * float((1 << BITS) - 1) / 2;
    return;
  }
  for (int r = 0; r < NR; r++) extra[r] = 0;
  if (BITS == 4) add_values4<NR>(codes, next, tokens, row, dim, w, permuted);
  else add_values8<NR>(codes, next, tokens, row, dim, w, natural);
}

// w[t] * scale[t] to `to`, which may be `w`; returns sum_t w[t] * minimum[t]. `scale` null: `all` holds for every token.
KTX_INLINE float scale_weights(const float* w, int size, const float* scale, const float* minimum, Affine all,
                               float* to) {
  vf sum = zero();
  for (int t = 0; t < size; t += W) {
    if (scale) all = {load(scale + t), load(minimum + t)};
    const vf x = load(w + t);
    sum = fmadd(x, all.minimum, sum);
    store(to + t, x * all.scale);
  }
  return hsum(sum);
}

// Values of one sealed page by weights p, which are 0 behind the page's last token. `part` [NR][kScoreStride] is scratch
// where a token has several scales.
template <int NR, int BITS>
static void add_sealed(const Layout& lay, bool integer, const HeadPage& page, const HeadPage& next, int tokens,
                       float* p, float* part, const SplitSums& s) {
  const int dim = lay.head_dim, size = lay.page_size, row = dim * BITS / 8, group = lay.v_group;
  const bool by_channel = lay.v_method == kPerChannel, by_token = lay.v_method == kPerToken;
  const Scales scales(page.v);
  alignas(64) float scale[kMaxDim], minimum[kMaxDim];
  static_assert(kMaxDim >= kMaxPage, "of a row, or of a column");
  float extra[NR], mass[NR];
  if (!by_channel && group == dim) {
    Affine all{};
    if (by_token) expand(scales, 0, size, scale, minimum);
    else all = scales.one(0);
    for (int r = 0; r < NR; r++) {
      float* w = p + r * kScoreStride;
      mass[r] = scale_weights(w, size, by_token ? scale : nullptr, minimum, all, w);
    }
    add_codes<NR, BITS>(integer, page.v_codes, next.v_codes, size, tokens, row, dim, p, s.natural, s.permuted, extra);
    for (int r = 0; r < NR; r++) s.offset[r] += mass[r] + extra[r];
    return;
  }
  // Scales that hold for a part of the page (a group of tokens or of channels) apply to its own sums of codes.
  const int width = by_channel ? dim : group, count = by_channel ? group : size, columns = dim / width;
  for (int t = 0, c0 = 0; t < tokens && c0 < dim; by_channel ? t += count : c0 += width) {
    const float* w = p + t;
    if (by_channel) {
      expand(scales, t / count * dim, dim, scale, minimum);
      for (int r = 0; r < NR; r++) {
        vf sum = zero();
        for (int i = 0; i < count; i += W) sum = sum + load(w + r * kScoreStride + i);
        mass[r] = hsum(sum);
      }
    } else {
      expand_column(scales, c0 / width, columns, 0, size, scale, minimum);
      for (int r = 0; r < NR; r++)
        mass[r] = scale_weights(w + r * kScoreStride, size, scale, minimum, Affine{}, part + r * kScoreStride);
      w = part;
    }
    for (int r = 0; r < NR; r++) std::memset(s.scratch + r * kQueryStride, 0, permuted_width(width) * sizeof(float));
    const int64_t at = int64_t(t) * row + c0 * BITS / 8;
    add_codes<NR, BITS>(integer, page.v_codes + at, next.v_codes + at, count, min_of(count, tokens - t), row, width, w,
                        s.scratch, s.scratch, extra);
    for (int r = 0; r < NR; r++) {
      const float* sum = s.scratch + r * kQueryStride;
      float* out = s.natural + r * kQueryStride + c0;
      const auto add = [&](int i, int c) {
        out[c] += by_channel ? scale[c] * (sum[i] + extra[r]) + minimum[c] * mass[r] : sum[i] + extra[r] + mass[r];
      };
      if (BITS == 4 || integer) each_channel<BITS>(width, add);
      else
        for (int c = 0; c < width; c++) add(c, c);
    }
  }
}

// Scores -> softmax weights in place, relative to the split's maximum; returns the maximum and the sum by vector.
static void weigh(float* scores, int count, float softcap, float* maximum, float* total) {
  if (softcap > 0)
    for (int t = 0; t < count; t += W) {
      const vf x = load(scores + t);  // masked slots stay masked
      store(scores + t, select_lt(x, set1(-3e38f), x, set1(softcap) * vtanh(x / set1(softcap))));
    }
  vf top = set1(kNegInf), sum = zero();
  for (int t = 0; t < count; t += W) top = vmax(load(scores + t), top);
  *maximum = hmax(top);
  const vf base = set1(*maximum == kNegInf ? 0.f : *maximum);
  for (int t = 0; t < count; t += W) {
    const vf e = vexp(load(scores + t) - base);
    sum = sum + e;
    store(scores + t, e);
  }
  *total = hsum(sum);
}

// What a split leaves behind, per vector: [0] maximum, [1] sum of weights, [kPartialHead ..] weighted values.
constexpr int kPartialHead = 16;
KTX_INLINE int partial_stride(int dim) { return kPartialHead + (dim + 15) / 16 * 16; }

// Vectors q[NR][kQueryStride] (times the softmax scale) over `count` pages (at most kSplitPages) -> partials[NR].
// `after`: the page that this thread will probably read next, or null.
template <int NR>
static void attend_split(const AttentionArgs& a, const PageRef* pages, int count, const PageRef* after,
                         int kv_head, const float* q, float* partials, Workspace& ws) {
  const Layout& lay = *a.layout;
  const int size = lay.page_size, dim = lay.head_dim;
  float* scores = ws.get<float>(kDecodeScores, 2 * size_t(NR) * kScoreStride);
  float* part = scores + NR * kScoreStride;
  float* sums = ws.get<float>(kDecodeAcc, (4 * NR + 1) * size_t(kQueryStride));
  for (int i = 0; i < 3 * NR; i++) std::memset(sums + i * kQueryStride, 0, permuted_width(dim) * sizeof(float));
  const SplitSums s{sums, sums + NR * kQueryStride, sums + 2 * NR * kQueryStride, sums + 3 * NR * kQueryStride,
                    sums + 4 * NR * kQueryStride};
  const bool rounds = kHasIntegers && a.dtype != kF32;  // the model's own dtype rounds far more than integers do
  for (int r = 0; r < NR; r++) s.offset[r] = 0;
  const auto sealed = [&](int i) { return head_page(lay, pages[i].payload, kv_head); };

  for (int i = 0; i < count; i++) {
    float* out = scores + i * size;
    if (pages[i].plain) {
      const uint8_t* k = plain_keys(a, pages[i], kv_head);
      with_dtype(a.dtype, [&](auto dt) { score_plain<NR, dt.value>(k, dim, pages[i].tokens, dim, q, out); });
    } else {
      const HeadPage page = sealed(i);
      HeadPage next = page;
      if (i + 1 < count && pages[i + 1].payload) {
        next = sealed(i + 1);
        prefetch_params(lay.k_scale, next.k);
      } else if (pages[0].payload) {  // the values' turn comes next
        const int quarter = size * dim / 4;
        next.plane0 = sealed(0).v_codes;
        next.plane1 = next.plane0 + quarter;
        next.low = next.plane0 + (lay.v_bits == 8 ? 2 * quarter : 0);
        prefetch_params(lay.v_scale, sealed(0).v);
      }
      if (lay.k_bits == 4) score_sealed<NR, 4>(lay, page, next, rounds, q, s.scratch, part, out);
      else score_sealed<NR, 8>(lay, page, next, rounds, q, s.scratch, part, out);
    }
    for (int r = 0; r < NR; r++)
      for (int t = pages[i].tokens; t < size; t++) out[r * kScoreStride + t] = kNegInf;
  }
  for (int r = 0; r < NR; r++) {
    float* out = partials + r * partial_stride(dim);
    weigh(scores + r * kScoreStride, count * size, a.softcap, out, out + 1);
  }
  for (int i = 0; i < count; i++) {
    float* p = scores + i * size;
    if (pages[i].plain) {
      const uint8_t* v = plain_values(a, pages[i], kv_head);
      with_dtype(a.dtype, [&](auto dt) { add_plain<NR, dt.value>(v, dim, pages[i].tokens, dim, p, s.plain); });
    } else {
      const HeadPage page = sealed(i);
      HeadPage next = page;
      if (i + 1 < count && pages[i + 1].payload) {
        next = sealed(i + 1);
        prefetch_params(lay.v_scale, next.v);
      } else if (after && after->payload) {
        next = head_page(lay, after->payload, kv_head);
        prefetch_params(lay.k_scale, next.k);
        prefetch_run(next.plane0, size * dim / 4), prefetch_run(next.plane1, size * dim / 4);
        next = page;
      }
      if (lay.v_bits == 4) add_sealed<NR, 4>(lay, rounds, page, next, pages[i].tokens, p, part, s);
      else add_sealed<NR, 8>(lay, rounds, page, next, pages[i].tokens, p, part, s);
    }
  }
  for (int r = 0; r < NR; r++) {
    float *natural = s.natural + r * kQueryStride, *permuted = s.permuted + r * kQueryStride;
    const auto add = [&](int i, int c) { natural[c] += permuted[i]; };
    if (lay.v_bits == 4) each_channel<4>(dim, add);
    else if (lay.v_bits == 8) each_channel<8>(dim, add);
    float* out = partials + r * partial_stride(dim) + kPartialHead;
    for (int c = 0; c < dim; c += W) store(natural + c, load(natural + c) + set1(s.offset[r]));
    if (lay.v_rotate) hadamard(natural, dim);
    for (int c = 0; c < dim; c += W) store(out + c, load(natural + c) + load(s.plain + r * kQueryStride + c));
  }
}

}  // namespace KTX_NS
