// The vector types that every kernel is written in: `vf` holds W floats, `vi` W 32-bit integers. One implementation for
// each ISA, chosen by the flags this source is compiled with; all in KTX_NS, so that the linker can never hand code
// built for a newer ISA to another variant. +, -, * on `vf` are the compiler's own.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ktx.h"

#define KTX_INLINE static inline __attribute__((always_inline, unused))

#if !defined(__AVX512F__) && !defined(__AVX2__)
#pragma GCC diagnostic ignored "-Wpsabi"  // 32-byte vectors without AVX: only ever passed to inlined functions
#endif

namespace KTX_NS {

// ---- scalars ------------------------------------------------------------------------------------------------------

template <class T>
KTX_INLINE constexpr T min_of(T a, T b) { return b < a ? b : a; }
template <class T>
KTX_INLINE T max_of(T a, T b) { return a < b ? b : a; }

KTX_INLINE uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
KTX_INLINE float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

KTX_INLINE float bf16_to_f32(uint16_t h) { return float_of(uint32_t(h) << 16); }
KTX_INLINE uint16_t f32_to_bf16(float x) {  // to nearest even; NaN stays NaN
  uint32_t u = bits_of(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(u >> 16 | 0x40u);
  return uint16_t((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}

#if defined(__F16C__)
KTX_INLINE float f16_to_f32(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
KTX_INLINE uint16_t f32_to_f16(float x) {
  return uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}
#else
KTX_INLINE float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7FFFu;
  if (rest >= 0x7C00u) return float_of(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));  // the product rebiases the exponent, denormals too
}
KTX_INLINE uint16_t f32_to_f16(float x) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u, rest = u & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return uint16_t(sign | 0x7E00u | (rest >> 13 & 0x3FFu));
  if (rest >= 0x477FF000u) return uint16_t(sign | 0x7C00u);  // 65520 and above round to infinity
  if (rest < 0x38800000u)                                    // denormal: let the adder round at 2^-24
    return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3F000000u));
  return uint16_t(sign | (rest - 0x38000000u + 0xFFFu + (rest >> 13 & 1u)) >> 13);
}
#endif

template <bool UP>
KTX_INLINE uint16_t f32_to_f16_toward(float x) {  // finite x within the fp16 range, rounded toward +inf or -inf
  const uint16_t near = f32_to_f16(x);
  const float back = f16_to_f32(near);
  if (UP ? back >= x : back <= x) return near;
  if ((near & 0x7FFFu) == 0) return UP ? 0x0001u : 0x8001u;
  return uint16_t((near >> 15) == UP ? near - 1 : near + 1);
}

template <int DT>
KTX_INLINE float load1(const void* p, int64_t i) {
  if (DT == ktx::kF32) return static_cast<const float*>(p)[i];
  const uint16_t h = static_cast<const uint16_t*>(p)[i];
  return DT == ktx::kF16 ? f16_to_f32(h) : bf16_to_f32(h);
}
KTX_INLINE int dtype_bytes(int dtype) { return dtype == ktx::kF32 ? 4 : 2; }

// ---- one ISA ------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;

KTX_INLINE vf zero() { return _mm512_setzero_ps(); }
KTX_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
KTX_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
KTX_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
KTX_INLINE vf fmadd(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
KTX_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
KTX_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
KTX_INLINE vf round_even(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KTX_INLINE float hsum(vf x) { return _mm512_reduce_add_ps(x); }
KTX_INLINE float hmax(vf x) { return _mm512_reduce_max_ps(x); }
KTX_INLINE float hmin(vf x) { return _mm512_reduce_min_ps(x); }

KTX_INLINE vi iset1(int32_t x) { return _mm512_set1_epi32(x); }
KTX_INLINE vi iload(const void* p) { return _mm512_loadu_si512(p); }
KTX_INLINE void istore(void* p, vi x) { _mm512_storeu_si512(p, x); }
KTX_INLINE vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
KTX_INLINE vi ior(vi a, vi b) { return _mm512_or_si512(a, b); }
KTX_INLINE vi ixor(vi a, vi b) { return _mm512_xor_si512(a, b); }
KTX_INLINE vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
template <int N>
KTX_INLINE vi srl(vi x) { return _mm512_srli_epi32(x, N); }
template <int N>
KTX_INLINE vi sll(vi x) { return _mm512_slli_epi32(x, N); }
KTX_INLINE vi pick(vi mask, vi a, vi b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xCA); }  // bits: mask ? a : b
KTX_INLINE vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
KTX_INLINE vi to_int(vf x) { return _mm512_cvtps_epi32(x); }  // to nearest even
KTX_INLINE vf as_float(vi x) { return _mm512_castsi512_ps(x); }
KTX_INLINE vi as_int(vf x) { return _mm512_castps_si512(x); }
KTX_INLINE vi load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KTX_INLINE vi lane_index() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
KTX_INLINE vf select_lt(vf a, vf b, vf yes, vf no) {  // a < b ? yes : no, by lane
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
KTX_INLINE vf select_nan(vf x, vf yes, vf no) {  // x is NaN ? yes : no
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), no, yes);
}
KTX_INLINE vf first_lanes(int n, vf yes, vf no) {  // lane < n ? yes : no
  return _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(lane_index(), _mm512_set1_epi32(n)), no, yes);
}
// The low four bits of each lane as a float: vpermps looks only at those, so neither mask nor conversion is needed.
KTX_INLINE vf nibble(vi x) {
  const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(x, table);
}
KTX_INLINE vf load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
KTX_INLINE vf load_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return as_float(sll<16>(_mm512_cvtepu16_epi32(h)));
}
KTX_INLINE void store_f16(uint16_t* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
template <bool UP>
KTX_INLINE void store_f16_toward(uint16_t* p, vf x) {  // rounds toward +inf or -inf
  constexpr int mode = UP ? _MM_FROUND_TO_POS_INF : _MM_FROUND_TO_NEG_INF;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, mode));
}
KTX_INLINE vi iload_first(const void* p, int n) {  // n of W lanes; the others are 0 and their bytes not touched
  return _mm512_maskz_loadu_epi32(n < W ? __mmask16((1u << n) - 1) : __mmask16(0xFFFF), p);
}
template <int I>
KTX_INLINE vi byte_lane(vi x) {  // byte I of each lane, zero-extended, in one shuffle
  const int z = 0x80808000 + I;
  return _mm512_shuffle_epi8(x, _mm512_set4_epi32(z + 12, z + 8, z + 4, z));
}
KTX_INLINE void store_low16(uint16_t* p, vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
KTX_INLINE void store_low8(uint8_t* p, vi x) {  // the low byte of each lane, W bytes
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
KTX_INLINE vf scale_by_power(vf x, vf n) { return _mm512_scalef_ps(x, n); }  // x * 2^n, n integral
KTX_INLINE vf fraction(vf x) { return _mm512_reduce_ps(x, 9); }               // x - floor(x); of -inf 0
template <int N>
KTX_INLINE vi sra(vi x) { return _mm512_srai_epi32(x, N); }
KTX_INLINE vi isub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
template <int H>
KTX_INLINE vf swap_halves(vf x) {  // lane i gets lane i ^ H
  if (H == 1) return _mm512_permute_ps(x, 0xB1);
  if (H == 2) return _mm512_permute_ps(x, 0x4E);
  return H == 4 ? _mm512_shuffle_f32x4(x, x, 0xB1) : _mm512_shuffle_f32x4(x, x, 0x4E);
}

#elif defined(__AVX2__)

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

KTX_INLINE vf zero() { return _mm256_setzero_ps(); }
KTX_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
KTX_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
KTX_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
KTX_INLINE vf fmadd(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
KTX_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
KTX_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
KTX_INLINE vf round_even(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
template <class F>
KTX_INLINE float reduce(vf x, F op) {
  __m128 y = op(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = op(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(op(y, _mm_movehdup_ps(y)));
}
KTX_INLINE float hsum(vf x) { return reduce(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }); }
KTX_INLINE float hmax(vf x) { return reduce(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); }); }
KTX_INLINE float hmin(vf x) { return reduce(x, [](__m128 a, __m128 b) { return _mm_min_ps(a, b); }); }

KTX_INLINE vi iset1(int32_t x) { return _mm256_set1_epi32(x); }
KTX_INLINE vi iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
KTX_INLINE void istore(void* p, vi x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
KTX_INLINE vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
KTX_INLINE vi ior(vi a, vi b) { return _mm256_or_si256(a, b); }
KTX_INLINE vi ixor(vi a, vi b) { return _mm256_xor_si256(a, b); }
KTX_INLINE vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
template <int N>
KTX_INLINE vi srl(vi x) { return _mm256_srli_epi32(x, N); }
template <int N>
KTX_INLINE vi sll(vi x) { return _mm256_slli_epi32(x, N); }
KTX_INLINE vi pick(vi mask, vi a, vi b) { return ior(iand(mask, a), _mm256_andnot_si256(mask, b)); }
KTX_INLINE vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }
KTX_INLINE vi to_int(vf x) { return _mm256_cvtps_epi32(x); }
KTX_INLINE vf as_float(vi x) { return _mm256_castsi256_ps(x); }
KTX_INLINE vi as_int(vf x) { return _mm256_castps_si256(x); }
KTX_INLINE vi load_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
KTX_INLINE vi lane_index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
KTX_INLINE vf select_lt(vf a, vf b, vf yes, vf no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
KTX_INLINE vf select_nan(vf x, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
KTX_INLINE vf first_lanes(int n, vf yes, vf no) {
  return _mm256_blendv_ps(no, yes, as_float(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_index())));
}
KTX_INLINE vf nibble(vi x) { return to_float(iand(x, iset1(15))); }
KTX_INLINE vf load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KTX_INLINE vf load_bf16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return as_float(sll<16>(_mm256_cvtepu16_epi32(h)));
}
KTX_INLINE void store_f16(uint16_t* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
template <bool UP>
KTX_INLINE void store_f16_toward(uint16_t* p, vf x) {
  constexpr int mode = UP ? _MM_FROUND_TO_POS_INF : _MM_FROUND_TO_NEG_INF;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, mode));
}
KTX_INLINE vi iload_first(const void* p, int n) {
  if (n >= W) return iload(p);
  return _mm256_maskload_epi32(static_cast<const int*>(p), _mm256_cmpgt_epi32(iset1(n), lane_index()));
}
template <int I>
KTX_INLINE vi byte_lane(vi x) {
  const int z = 0x80808000 + I;
  return _mm256_shuffle_epi8(x, _mm256_setr_epi32(z, z + 4, z + 8, z + 12, z, z + 4, z + 8, z + 12));
}
KTX_INLINE void store_low16(uint16_t* p, vi x) {
  x = iand(x, iset1(0xFFFF));
  x = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(x));
}
KTX_INLINE void store_low8(uint8_t* p, vi x) {
  x = iand(x, iset1(0xFF));
  x = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
  const __m128i h = _mm256_castsi256_si128(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(h, h));
}
KTX_INLINE vf scale_by_power(vf x, vf n) { return x * as_float(sll<23>(iadd(to_int(n), iset1(127)))); }
KTX_INLINE vf fraction(vf x) { return x - _mm256_round_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
template <int N>
KTX_INLINE vi sra(vi x) { return _mm256_srai_epi32(x, N); }
KTX_INLINE vi isub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
template <int H>
KTX_INLINE vf swap_halves(vf x) {
  return H == 1 ? _mm256_permute_ps(x, 0xB1) : H == 2 ? _mm256_permute_ps(x, 0x4E) : _mm256_permute2f128_ps(x, x, 1);
}

#else

constexpr int W = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));

template <class F>
KTX_INLINE vf each(F f) { vf r; for (int i = 0; i < W; i++) r[i] = f(i); return r; }
template <class F>
KTX_INLINE vi ieach(F f) { vi r; for (int i = 0; i < W; i++) r[i] = f(i); return r; }

KTX_INLINE vf set1(float x) { return each([=](int) { return x; }); }
KTX_INLINE vf zero() { return set1(0); }
KTX_INLINE vf load(const float* p) { vf r; std::memcpy(&r, p, sizeof r); return r; }
KTX_INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
KTX_INLINE vf fmadd(vf a, vf b, vf c) { return a * b + c; }
KTX_INLINE vf as_float(vi x) { return (vf)x; }
KTX_INLINE vi as_int(vf x) { return (vi)x; }
KTX_INLINE vi iset1(int32_t x) { return ieach([=](int) { return x; }); }
KTX_INLINE vi iload(const void* p) { vi r; std::memcpy(&r, p, sizeof r); return r; }
KTX_INLINE void istore(void* p, vi x) { std::memcpy(p, &x, sizeof x); }
KTX_INLINE vi iand(vi a, vi b) { return a & b; }
KTX_INLINE vi ior(vi a, vi b) { return a | b; }
KTX_INLINE vi ixor(vi a, vi b) { return a ^ b; }
KTX_INLINE vi iadd(vi a, vi b) { return a + b; }
KTX_INLINE vi pick(vi mask, vi a, vi b) { return (mask & a) | (~mask & b); }
template <int N>
KTX_INLINE vi srl(vi x) { return (vi)((vu)x >> N); }
template <int N>
KTX_INLINE vi sll(vi x) { return (vi)((vu)x << N); }
KTX_INLINE vf blend(vi mask, vf yes, vf no) { return as_float(pick(mask, as_int(yes), as_int(no))); }
KTX_INLINE vf vmax(vf a, vf b) { return blend(a > b, a, b); }
KTX_INLINE vf vmin(vf a, vf b) { return blend(a < b, a, b); }
KTX_INLINE vf select_lt(vf a, vf b, vf yes, vf no) { return blend(a < b, yes, no); }
KTX_INLINE vf select_nan(vf x, vf yes, vf no) { return blend(x != x, yes, no); }
KTX_INLINE vi lane_index() { return ieach([](int i) { return i; }); }
KTX_INLINE vf first_lanes(int n, vf yes, vf no) { return blend(lane_index() < iset1(n), yes, no); }
KTX_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
KTX_INLINE vf round_even(vf x) { return each([=](int i) { return __builtin_nearbyintf(x[i]); }); }
KTX_INLINE vi to_int(vf x) { return __builtin_convertvector(round_even(x), vi); }
KTX_INLINE vf nibble(vi x) { return to_float(x & 15); }
KTX_INLINE float hsum(vf x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
KTX_INLINE float hmax(vf x) { float r = x[0]; for (int i = 1; i < W; i++) r = max_of(r, x[i]); return r; }
KTX_INLINE float hmin(vf x) { float r = x[0]; for (int i = 1; i < W; i++) r = min_of(r, x[i]); return r; }
KTX_INLINE vi load_u8(const uint8_t* p) { return ieach([=](int i) { return p[i]; }); }
KTX_INLINE vf load_f16(const uint16_t* p) { return each([=](int i) { return f16_to_f32(p[i]); }); }
KTX_INLINE vf load_bf16(const uint16_t* p) { return each([=](int i) { return bf16_to_f32(p[i]); }); }
KTX_INLINE void store_f16(uint16_t* p, vf x) { for (int i = 0; i < W; i++) p[i] = f32_to_f16(x[i]); }
template <bool UP>
KTX_INLINE void store_f16_toward(uint16_t* p, vf x) { for (int i = 0; i < W; i++) p[i] = f32_to_f16_toward<UP>(x[i]); }
KTX_INLINE vi iload_first(const void* p, int n) {
  vi x = ieach([](int) { return 0; });
  std::memcpy(&x, p, 4 * min_of(n, W));
  return x;
}
template <int I>
KTX_INLINE vi byte_lane(vi x) { return srl<24>(sll<24 - 8 * I>(x)); }
KTX_INLINE void store_low16(uint16_t* p, vi x) { for (int i = 0; i < W; i++) p[i] = uint16_t(x[i]); }
KTX_INLINE void store_low8(uint8_t* p, vi x) { for (int i = 0; i < W; i++) p[i] = uint8_t(x[i]); }
KTX_INLINE vf scale_by_power(vf x, vf n) { return x * as_float(sll<23>(iadd(to_int(n), iset1(127)))); }
KTX_INLINE vf fraction(vf x) { return each([=](int i) { return x[i] - __builtin_floorf(x[i]); }); }
template <int N>
KTX_INLINE vi sra(vi x) { return x >> N; }
KTX_INLINE vi isub(vi a, vi b) { return a - b; }
template <int H>
KTX_INLINE vf swap_halves(vf x) { return each([=](int i) { return x[i ^ H]; }); }

#endif

// ---- built from the above -----------------------------------------------------------------------------------------

KTX_INLINE void store_bf16(uint16_t* p, vf x) {
  const vi u = as_int(x), odd = iand(srl<16>(u), iset1(1));
  const vi rounded = iadd(iadd(u, iset1(0x7FFF)), odd), quiet = ior(u, iset1(0x400000));
  store_low16(p, srl<16>(as_int(select_nan(x, as_float(quiet), as_float(rounded)))));
}

template <int DT>
KTX_INLINE vf load_as(const void* p, int64_t i) {  // W elements from element i on
  if (DT == ktx::kF32) return load(static_cast<const float*>(p) + i);
  const uint16_t* h = static_cast<const uint16_t*>(p) + i;
  return DT == ktx::kF16 ? load_f16(h) : load_bf16(h);
}
template <int DT>
KTX_INLINE void store_as(void* p, int64_t i, vf x) {
  if (DT == ktx::kF32) return store(static_cast<float*>(p) + i, x);
  uint16_t* h = static_cast<uint16_t*>(p) + i;
  DT == ktx::kF16 ? store_f16(h, x) : store_bf16(h, x);
}

KTX_INLINE vf u8_to_float(const uint8_t* p) { return to_float(load_u8(p)); }

// e^x with a relative error of 1e-7 for results in the normal range; below that 0, so that exp(-inf) is 0. NaN stays.
KTX_INLINE vf vexp(vf x) {
  const vf lowest = set1(-87.336f);
  const vf y = vmin(set1(89.f), vmax(lowest, x));  // NaN passes: it is the second operand
  const vf n = round_even(y * set1(1.44269504f));
  vf r = fmadd(n, set1(-0.693359375f), y);         // ln 2 in two parts: n times the first is exact
  r = fmadd(n, set1(2.12194440e-4f), r);
  vf p = fmadd(r, set1(1.3814528e-3f), set1(8.3687505e-3f));
  p = fmadd(p, r, set1(4.1668391e-2f));
  p = fmadd(p, r, set1(1.6666520e-1f));
  p = fmadd(p, r, set1(4.9999993e-1f));
  p = fmadd(p, r * r, r) + set1(1.f);
  return select_lt(x, lowest, zero(), scale_by_power(p, n));
}

KTX_INLINE vf vtanh(vf x) {  // absolute error about 1e-7
  const vf y = vmin(set1(30.f), vmax(set1(-30.f), x));
  return set1(1.f) - set1(2.f) / (vexp(y + y) + set1(1.f));
}

template <int H>
KTX_INLINE vf butterfly(vf x) {  // lane pairs (i, i + H) -> (sum, difference)
  const vi upper = sll<31>(srl<H == 1 ? 0 : H == 2 ? 1 : H == 4 ? 2 : 3>(lane_index()));
  return as_float(ixor(as_int(x), upper)) + swap_halves<H>(x);
}

// Sums of integer products. GCC copies, or spills, those of any other type around each product.
typedef int32_t Sums __attribute__((vector_size(sizeof(vi))));

KTX_INLINE void prefetch_run(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 3);
}

}  // namespace KTX_NS
