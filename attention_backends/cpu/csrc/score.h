// How much of a query's attention each page holds, estimated from few bytes: from the page's header (mean and deviation of
// its keys), or from plane 0 of its key codes (2-bit keys). Both give a log-mass: ln sum_t exp(score_t).
//
// The header's estimate takes a page's scores as normal, with its spread saturating where the largest of n tokens would
// outweigh the rest: v = 0.7 s^2 sum_d q_d^2 dev_d^2; L = a + ln n + (v/2 if sqrt(v) < sqrt(2 ln n), else
// sqrt(v) sqrt(2 ln n) - ln n). `attention_backends/sparse_pages.py` is the oracle.
#pragma once
#include "decode.h"

namespace KTX_NS {

constexpr float kVarianceShare = 0.7f;

KTX_INLINE vf vsqrt(vf x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(x);
#else
  return each([=](int i) { return __builtin_sqrtf(x[i]); });
#endif
}

// ---- headers ------------------------------------------------------------------------------------------------------
//
// a = q . mean and v = q^2 . deviation^2 of many pages. Headers are bytes, so the query and its squares are folded into
// int16 once: products add up in int32, W pages are summed across lanes together.

#if defined(__AVX512F__)
KTX_INLINE vi load_s8_words(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
KTX_INLINE vi load_s8_half(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
KTX_INLINE vi square_words(vi x) { return _mm512_mullo_epi16(x, x); }
KTX_INLINE vi sum_each(const vi (&x)[W]) {  // lane i: the sum of x[i]
  const auto pairs = [](vi a, vi b) { return iadd(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
  const auto fours = [](vi a, vi b) { return iadd(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)); };
  const auto blocks = [](vi a, vi b) {
    return iadd(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  };
  vi four[4];
  for (int i = 0; i < 4; i++) four[i] = fours(pairs(x[4 * i], x[4 * i + 1]), pairs(x[4 * i + 2], x[4 * i + 3]));
  return blocks(blocks(four[0], four[1]), blocks(four[2], four[3]));
}
#elif defined(__AVX2__)
KTX_INLINE vi load_s8_words(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KTX_INLINE vi load_s8_half(const int8_t*) { return _mm256_setzero_si256(); }  // 2 W divides every head_dim
KTX_INLINE vi square_words(vi x) { return _mm256_mullo_epi16(x, x); }
KTX_INLINE vi sum_each(const vi (&x)[W]) {
  const auto pairs = [&](int i) { return _mm256_hadd_epi32(x[i], x[i + 1]); };
  vi four[2];
  for (int i = 0; i < 2; i++) four[i] = _mm256_hadd_epi32(pairs(4 * i), pairs(4 * i + 2));
  return iadd(_mm256_permute2x128_si256(four[0], four[1], 0x20), _mm256_permute2x128_si256(four[0], four[1], 0x31));
}
#else
KTX_INLINE vi load_s8_words(const int8_t* p) {
  return ieach([=](int i) { return int32_t(uint32_t(uint16_t(p[2 * i])) | uint32_t(uint16_t(p[2 * i + 1])) << 16); });
}
KTX_INLINE vi load_s8_half(const int8_t*) { return iset1(0); }
KTX_INLINE vi square_words(vi x) {
  const vi low = sra<16>(sll<16>(x)), high = sra<16>(x);
  return ior(iand(low * low, iset1(0xFFFF)), sll<16>(high * high));
}
KTX_INLINE vi dot_words(vi sum, vi a, vi b) {
  return sum + sra<16>(sll<16>(a)) * sra<16>(sll<16>(b)) + sra<16>(a) * sra<16>(b);
}
KTX_INLINE vi sum_each(const vi (&x)[W]) {
  return ieach([&](int i) { int32_t sum = 0; for (int j = 0; j < W; j++) sum += x[i][j]; return sum; });
}
#endif

// Into the second-level cache: a group of pages ahead, they would push each other out of the first.
KTX_INLINE void fetch_header(const uint8_t* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Queries are folded as words [width / (2 W)][vectors][2][2 W] int16: of each 2 W channels the query, then its squares,
// of all vectors that share a pass. steps[2] of a vector: what one of each is worth.
KTX_INLINE int header_width(int dim) { return (dim + 31) / 32 * 32; }

static void fold_header_query(const float* q, int dim, int vectors, int16_t* words, float* steps) {
  const int width = header_width(dim);
  vf top = zero(), zeros = zero();
  for (int c = 0; c < dim; c += W) {
    const vf x = load(q + c);
    top = vmax(as_float(iand(as_int(x), iset1(0x7FFFFFFF))), top);
    zeros = fmadd(x, zero(), zeros);  // NaN where the query isn't finite
  }
  const float largest = hmax(top);
  const bool finite = hsum(zeros) == 0;
  // All `dim` products with squares of deviations, at most 127^2, add up in one int32.
  const float most = min_of(32767.f, 0x1p31f / float(127 * 127) / float(dim) - 1);
  const vf inverse = set1(finite && largest > 1e-30f ? 1.f / largest : 0.f);
  for (int c = 0; c < width; c += W) {
    const vf x = c < dim ? load(q + c) * inverse : zero();
    uint16_t* to = reinterpret_cast<uint16_t*>(words) + c / (2 * W) * vectors * 4 * W + c % (2 * W);
    store_low16(to, to_int(x * set1(32767.f)));
    store_low16(to + 2 * W, to_int(x * x * set1(most)));
  }
  steps[0] = finite ? largest / 32767.f : __builtin_nanf("");
  steps[1] = finite ? largest * largest / most : __builtin_nanf("");
}

// Scores of pages begin .. end by NR queries folded together, to mean and variance [NR][stride], from [begin] on; up to
// W - 1 places behind `end` are overwritten. `header(i)` is page i's; pages up to `known` are worth prefetching.
template <int NR, class F>
static void scan_headers(F header, int begin, int end, int known, int dim, const int16_t* words, const float* steps,
                         float* mean, float* variance, int64_t stride) {
  for (int from = begin; from < end; from += W) {
    const int n = min_of(W, end - from);
    vi dots[NR][W], spreads[NR][W];
    alignas(64) float mean_scale[W] = {}, deviation_scale[W] = {};
    for (int j = 0; j < n; j++) {
      const uint8_t* at = header(from + j);
      if (from + j + W < known) fetch_header(header(from + j + W), 2 * dim + 4);
      const int8_t *m = reinterpret_cast<const int8_t*>(at), *d = m + dim;
      const int16_t* query = words;
      Sums dot[NR], spread[NR];
      unroll<NR>([&](auto r) KTX_LAMBDA { dot[r.value] = spread[r.value] = Sums{}; });
      const auto add = [&](vi x, vi deviation) KTX_LAMBDA {
        const vi y = square_words(deviation);
        unroll<NR>([&](auto r) KTX_LAMBDA {
          dot[r.value] = (Sums)dot_words((vi)dot[r.value], x, iload(query + r.value * 4 * W));
          spread[r.value] = (Sums)dot_words((vi)spread[r.value], y, iload(query + r.value * 4 * W + 2 * W));
        });
        query += NR * 4 * W;
      };
      int c = 0;
      for (; c + 2 * W <= dim; c += 2 * W, m += 2 * W, d += 2 * W) add(load_s8_words(m), load_s8_words(d));
      if (c < dim) add(load_s8_half(m), load_s8_half(d));
      unroll<NR>([&](auto r) KTX_LAMBDA {
        dots[r.value][j] = (vi)dot[r.value], spreads[r.value][j] = (vi)spread[r.value];
      });
      uint16_t scales[2];
      std::memcpy(scales, at + 2 * dim, 4);
      mean_scale[j] = f16_to_f32(scales[0]), deviation_scale[j] = f16_to_f32(scales[1]);
    }
    const vf by_mean = load(mean_scale), by_deviation = load(deviation_scale) * load(deviation_scale);
    for (int r = 0; r < NR; r++) {
      for (int j = n; j < W; j++) dots[r][j] = spreads[r][j] = iset1(0);
      store(mean + r * stride + from, to_float(sum_each(dots[r])) * by_mean * set1(steps[2 * r]));
      store(variance + r * stride + from, to_float(sum_each(spreads[r])) * by_deviation * set1(steps[2 * r + 1]));
    }
  }
}

// Log-mass of a page of exp(log_tokens) keys from mean score a and unscaled variance v, W pages at once.
KTX_INLINE vf header_mass(vf a, vf v, vf log_tokens) {
  const vf sd = vsqrt(v * set1(kVarianceShare)), edge = vsqrt(set1(2.f) * log_tokens);
  const vf wide = sd * edge - log_tokens;
  return a + log_tokens + select_lt(sd, edge, sd * sd * set1(0.5f), wide);
}

// ---- plane 0 ------------------------------------------------------------------------------------------------------

// Query vectors folded with one row of key scales, as int8 with one step each; what rounding, the code's middle and the
// error of two bits leave.
template <int NR>
struct ByteQuery {
  alignas(64) int8_t byte[NR][kMaxDim];
  float step[NR], bias[NR];
};

// Natural logarithm of positive x to 1e-7 (FreeBSD's logf, its argument reduced to [sqrt(1/2), sqrt(2))); NaN stays.
KTX_INLINE vf vlog(vf x) {
  const vi bits = iadd(as_int(x), iset1(0x3F800000 - 0x3F3504F3));
  const vf k = to_float(isub(sra<23>(bits), iset1(127)));
  const vf f = as_float(iadd(iand(bits, iset1(0x007FFFFF)), iset1(0x3F3504F3))) - set1(1.f);
  const vf s = f / (set1(2.f) + f), z = s * s, w = z * z, half = set1(0.5f) * f * f;
  const vf odd = z * fmadd(w, set1(0.28498786688f), set1(0.66666662693f));
  const vf even = w * fmadd(w, set1(0.24279078841f), set1(0.40000972152f));
  const vf low = fmadd(k, set1(9.0580006145e-06f), s * (half + odd + even)) - half + f;
  return select_nan(x, x, fmadd(k, set1(6.9313812256e-01f), low));
}

#if defined(__AVX512F__)
KTX_INLINE vi dot_bytes(vi sum, vi codes, vi query) { return _mm512_dpbusd_epi32(sum, codes, query); }
#elif defined(__AVX2__)
KTX_INLINE vi dot_bytes(vi sum, vi codes, vi query) {  // codes are at most 3: the int16 pairs can't saturate
  return iadd(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, query), _mm256_set1_epi16(1)));
}
#else
KTX_INLINE vi dot_bytes(vi sum, vi codes, vi query) {
  for (int b = 0; b < 4; b++) {
    const vi c = iand((vi)((vu)codes >> (8 * b)), iset1(255)), x = sra<24>((vi)((vu)query << (24 - 8 * b)));
    sum = iadd(sum, c * x);
  }
  return sum;
}
#endif

KTX_INLINE vi broadcast_word(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return iset1(x);
}

template <int NR>
static void fold_query(const Layout& lay, const Scales& scales, const float* q, float* scratch, ByteQuery<NR>& out) {
  const int dim = lay.head_dim;
  const float per_step = float(1 << (lay.k_bits - 2));  // codes that one step of the top two bits covers
  vf low[NR], noise[NR], top[NR];
  unroll<NR>([&](auto r) KTX_LAMBDA { low[r.value] = noise[r.value] = top[r.value] = zero(); });
  for (int c = 0; c < dim; c += W) {
    const Affine own = scales.vector(c);
    const vf scale = own.scale, minimum = own.minimum, step = scale * set1(per_step);
    // The middle of a step, and 1.5, which codes 0 .. 3 average: what rounding the query took comes back as that.
    const vf middle = fmadd(scale, set1((per_step - 1) / 2), fmadd(step, set1(1.5f), minimum));
    unroll<NR>([&](auto r) KTX_LAMBDA {
      const vf x = load(q + r.value * kQueryStride + c), y = x * step;
      low[r.value] = fmadd(x, middle, low[r.value]);
      noise[r.value] = fmadd(y, y, noise[r.value]);
      top[r.value] = vmax(as_float(iand(as_int(y), iset1(0x7FFFFFFF))), top[r.value]);
      store(scratch + r.value * kQueryStride + c, y);
    });
  }
  vf inverse[NR];
  unroll<NR>([&](auto r) KTX_LAMBDA {
    const float largest = hmax(top[r.value]);
    out.step[r.value] = largest / 127.f;
    inverse[r.value] = set1(largest > 0 && largest < 3e38f ? 127.f / largest : 0.f);
  });
  vi kept[NR];
  unroll<NR>([&](auto r) KTX_LAMBDA { kept[r.value] = iset1(0); });
  for (int c = 0; c < dim; c += W)
    unroll<NR>([&](auto r) KTX_LAMBDA {
      const vi rounded = to_int(load(scratch + r.value * kQueryStride + c) * inverse[r.value]);
      kept[r.value] = iadd(kept[r.value], rounded);
      store_low8(reinterpret_cast<uint8_t*>(out.byte[r.value]) + c, rounded);
    });
  unroll<NR>([&](auto r) KTX_LAMBDA {
    const vf bias = fmadd(to_float(kept[r.value]), set1(-1.5f * out.step[r.value]), low[r.value]);
    out.bias[r.value] = hsum(fmadd(noise[r.value], set1(1.f / 24), bias));  // half the variance of a uniform error of a step
  });
}

// Scores of TV * W tokens from `t0` on, by vector, to scores[NR][kQueryStride].
template <int NR, int TV>
static void plane0_scores(const uint8_t* plane0, const uint8_t* next, const ByteQuery<NR>& query, int size, int dim,
                          int t0, float* scores) {
  vi sum[NR][TV];
  unroll<NR * TV>([&](auto n) KTX_LAMBDA { sum[n.value / TV][n.value % TV] = iset1(0); });
  for (int d4 = 0; d4 < dim / 16; d4++) {
    const int64_t at = (int64_t(d4) * size + t0) * 4;
    vi w[TV];
    unroll<TV>([&](auto v) KTX_LAMBDA { w[v.value] = iload(plane0 + at + v.value * W * 4); });
    for (int line = 0; line < TV * W * 4; line += 64) __builtin_prefetch(next + at + line, 0, 2);
    unroll<4>([&](auto k) KTX_LAMBDA {
      vi codes[TV];
      unroll<TV>([&](auto v) KTX_LAMBDA { codes[v.value] = iand(srl<2 * k.value>(w[v.value]), iset1(0x03030303)); });
      unroll<NR>([&](auto r) KTX_LAMBDA {
        const vi x = broadcast_word(query.byte[r.value] + k.value * (dim / 4) + 4 * d4);
        unroll<TV>([&](auto v) KTX_LAMBDA {
          vi& s = sum[r.value][v.value];
          s = dot_bytes(s, codes[v.value], x);
        });
      });
    });
  }
  unroll<NR * TV>([&](auto n) KTX_LAMBDA {
    constexpr int r = n.value / TV, v = n.value % TV;
    store(scores + r * kQueryStride + t0 + v * W, fmadd(to_float(sum[r][v]), set1(query.step[r]), set1(query.bias[r])));
  });
}

// Log-mass of one sealed page from its 2-bit keys, by vector, to mass[W]. Needs keys scaled per channel. `next`: the plane
// of a page to come, fetched meanwhile; into the second-level cache, since the first takes in fewer lines at a time.
template <int NR>
static void score_plane0(const Layout& lay, const HeadPage& page, const uint8_t* next, const float* q, float* scratch,
                         float* mass) {
  static_assert(NR <= W, "one vector holds a page's masses");
  constexpr int TV = W == 16 ? 4 : 2;  // token vectors at a time
  const int dim = lay.head_dim, size = lay.page_size;
  ByteQuery<NR> query;
  alignas(64) float folded[NR * kQueryStride];
  float* scores = scratch;  // [NR][kQueryStride]
  for (int t = 0, row = 0; t < size; row += dim) {
    fold_query<NR>(lay, Scales(page.k, row), q, folded, query);
    const int end = t + lay.k_group;
    for (; t + TV * W <= end; t += TV * W) plane0_scores<NR, TV>(page.plane0, next, query, size, dim, t, scores);
    for (; t < end; t += 2 * W) plane0_scores<NR, 2>(page.plane0, next, query, size, dim, t, scores);
  }
  alignas(64) float top[W], total[W];
  for (int r = NR; r < W; r++) top[r] = 0, total[r] = 1;
  vf most[NR], sum[NR];
  unroll<NR>([&](auto r) KTX_LAMBDA { most[r.value] = set1(kNegInf), sum[r.value] = zero(); });
  for (int i = 0; i < size; i += W)
    unroll<NR>([&](auto r) KTX_LAMBDA {
      most[r.value] = vmax(load(scores + r.value * kQueryStride + i), most[r.value]);
    });
  unroll<NR>([&](auto r) KTX_LAMBDA {
    top[r.value] = hmax(most[r.value]);
    most[r.value] = set1(top[r.value]);
  });
  for (int i = 0; i < size; i += W)
    unroll<NR>([&](auto r) KTX_LAMBDA {
      sum[r.value] = sum[r.value] + vexp(load(scores + r.value * kQueryStride + i) - most[r.value]);
    });
  unroll<NR>([&](auto r) KTX_LAMBDA { total[r.value] = hsum(sum[r.value]); });
  store(mass, load(top) + vlog(load(total)));
}

}  // namespace KTX_NS
