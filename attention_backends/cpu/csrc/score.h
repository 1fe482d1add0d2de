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

KTX_INLINE vi load_s8(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return sra<24>(sll<24>(load_u8(reinterpret_cast<const uint8_t*>(p))));
#endif
}

KTX_INLINE vf vsqrt(vf x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(x);
#else
  return each([=](int i) { return __builtin_sqrtf(x[i]); });
#endif
}

// Query vectors for header scoring: q times the softmax scale, and its squares; [NR][kQueryStride] each.
// a[r] = q . mean and v[r] = q^2 . deviation^2 of one kv head's header.
template <int NR>
static void score_header(const uint8_t* header, int dim, const float* q, const float* squares, float* a, float* v) {
  const int8_t *mean = reinterpret_cast<const int8_t*>(header), *deviation = mean + dim;
  uint16_t scales[2];
  std::memcpy(scales, header + 2 * dim, 4);
  vf dot[NR], spread[NR];
  for (int r = 0; r < NR; r++) dot[r] = spread[r] = zero();
  for (int c = 0; c < dim; c += W) {
    const vf m = to_float(load_s8(mean + c)), d = to_float(load_s8(deviation + c)), d2 = d * d;
    for (int r = 0; r < NR; r++) {
      dot[r] = fmadd(m, load(q + r * kQueryStride + c), dot[r]);
      spread[r] = fmadd(d2, load(squares + r * kQueryStride + c), spread[r]);
    }
  }
  const float mean_scale = f16_to_f32(scales[0]), deviation_scale = f16_to_f32(scales[1]);
  for (int r = 0; r < NR; r++) {
    a[r] = hsum(dot[r]) * mean_scale;
    v[r] = hsum(spread[r]) * deviation_scale * deviation_scale;
  }
}

// Log-mass of a page of `tokens` from mean score a and unscaled variance v, W pages at once.
KTX_INLINE vf header_mass(vf a, vf v, float log_tokens) {
  const vf sd = vsqrt(v * set1(kVarianceShare)), edge = set1(__builtin_sqrtf(2 * log_tokens));
  const vf wide = sd * edge - set1(log_tokens);
  return a + set1(log_tokens) + select_lt(sd, edge, sd * sd * set1(0.5f), wide);
}

// ---- plane 0 ------------------------------------------------------------------------------------------------------

// Query vectors folded with one page's key scales, as int8 with one step each; what rounding and the code's middle leave.
template <int NR>
struct ByteQuery {
  alignas(64) int8_t byte[NR][kMaxDim];
  float step[NR], bias[NR], noise[NR];
};

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
static void fold_query(const Layout& lay, const HeadPage& page, const float* q, float* scratch, ByteQuery<NR>& out) {
  const int dim = lay.head_dim;
  const float per_step = float(1 << (lay.k_bits - 2));  // codes that one step of the top two bits covers
  vf low[NR], noise[NR], top[NR], sum[NR];
  for (int r = 0; r < NR; r++) low[r] = noise[r] = top[r] = sum[r] = zero();
  for (int c = 0; c < dim; c += W) {
    const vf scale = load_f16(page.k_scale + c), minimum = load_f16(page.k_min + c);
    const vf step = scale * set1(per_step), middle = fmadd(scale, set1((per_step - 1) / 2), minimum);
    for (int r = 0; r < NR; r++) {
      const vf x = load(q + r * kQueryStride + c), y = x * step;
      low[r] = fmadd(x, middle, low[r]);
      noise[r] = fmadd(y, y, noise[r]);
      sum[r] = sum[r] + y;
      top[r] = vmax(as_float(iand(as_int(y), iset1(0x7FFFFFFF))), top[r]);
      store(scratch + r * kQueryStride + c, y);
    }
  }
  for (int r = 0; r < NR; r++) {
    const float largest = hmax(top[r]);
    const float step = largest / 127.f, inverse = largest > 0 && largest < 3e38f ? 127.f / largest : 0.f;
    vi kept = iset1(0);
    for (int c = 0; c < dim; c += W) {
      const vi rounded = to_int(load(scratch + r * kQueryStride + c) * set1(inverse));
      kept = iadd(kept, rounded);
      store_low8(reinterpret_cast<uint8_t*>(out.byte[r]) + c, rounded);
    }
    out.step[r] = step;
    // Codes average 1.5 of 0 .. 3: what rounding took comes back as that constant.
    out.bias[r] = hsum(low[r]) + 1.5f * (hsum(sum[r]) - step * hsum(to_float(kept)));
    out.noise[r] = hsum(noise[r]) / 24;  // half the variance of a uniform error of one step
  }
}

// Log-mass of one sealed page from its 2-bit keys, by vector. Needs keys scaled per channel.
template <int NR>
static void score_plane0(const Layout& lay, const HeadPage& page, const uint8_t* next, const float* q, float* scratch,
                         float* mass) {
  constexpr int TV = W == 16 ? 4 : 2;  // token vectors at a time
  const int dim = lay.head_dim, size = lay.page_size, words = dim / 16;
  ByteQuery<NR> query;
  fold_query<NR>(lay, page, q, scratch, query);
  float* scores = scratch;  // [NR][kQueryStride], folded queries are done with
  for (int t0 = 0; t0 < size; t0 += TV * W) {
    const int vectors = min_of(TV, (size - t0) / W);
    vi sum[NR][TV];
    for (int r = 0; r < NR; r++)
      for (int v = 0; v < TV; v++) sum[r][v] = iset1(0);
    for (int d4 = 0; d4 < words; d4++) {
      const int64_t at = (int64_t(d4) * size + t0) * 4;
      vi w[TV];
      for (int v = 0; v < TV; v++) w[v] = iload(page.plane0 + at + (v < vectors ? v : 0) * W * 4);
      for (int line = 0; line < TV * W * 4; line += 64) fetch(next + at + line);
      unroll<4>([&](auto k) KTX_LAMBDA {
        vi codes[TV];
        for (int v = 0; v < TV; v++) codes[v] = iand(srl<2 * k.value>(w[v]), iset1(0x03030303));
        for (int r = 0; r < NR; r++) {
          const vi x = broadcast_word(query.byte[r] + k.value * (dim / 4) + 4 * d4);
          for (int v = 0; v < TV; v++) sum[r][v] = dot_bytes(sum[r][v], codes[v], x);
        }
      });
    }
    for (int r = 0; r < NR; r++)
      for (int v = 0; v < vectors; v++)
        store(scores + r * kQueryStride + t0 + v * W, fmadd(to_float(sum[r][v]), set1(query.step[r]), set1(query.bias[r])));
  }
  for (int r = 0; r < NR; r++) {
    float top, total;
    weigh(scores + r * kQueryStride, size, 0, &top, &total);
    mass[r] = top + __builtin_logf(total) + query.noise[r];
  }
}

}  // namespace KTX_NS
