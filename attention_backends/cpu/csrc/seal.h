// Sealing: one page of one kv head from the model's dtype to bytes, by the arithmetic of kv_quant/codec.py, step by
// step in the same order, so that the bytes agree. Appending: fresh rows into open pages.
#pragma once
#include "common.h"

namespace KTX_NS {

// x[tokens][dim] in float32, NaN as 0, clamped to the fp16 range.
template <int DT>
static void gather_tokens(const void* src, int64_t first, int64_t token_stride, int tokens, int dim, float* x) {
  const vf top = set1(65504.f), bottom = set1(-65504.f);
  for (int t = 0; t < tokens; t++)
    for (int c = 0; c < dim; c += W) {
      const vf raw = load_as<DT>(src, first + t * token_stride + c);
      store(x + t * dim + c, vmin(vmax(select_nan(raw, zero(), raw), bottom), top));
    }
}

// Least and greatest value of what shares a scale (scales.h says in which order), which becomes minimum and scale.
static void find_range(const float* x, int tokens, int dim, int method, int group, float* low, float* high) {
  if (method == kPerChannel) {
    for (int t = 0; t < tokens; t += group, x += group * dim, low += dim, high += dim)
      for (int c = 0; c < dim; c += W) {
        vf least = load(x + c), most = least;
        for (int i = 1; i < group; i++) {
          least = vmin(least, load(x + i * dim + c));
          most = vmax(most, load(x + i * dim + c));
        }
        store(low + c, least), store(high + c, most);
      }
    return;
  }
  vf least = load(x), most = least;
  for (int i = 0; i < tokens * dim; i += group) {  // group: dim for one scale a head
    if (method == kPerToken) least = most = load(x + i);
    for (int c = i; c < i + group; c += W) least = vmin(least, load(x + c)), most = vmax(most, load(x + c));
    if (method == kPerToken) *low++ = hmin(least), *high++ = hmax(most);
  }
  if (method == kPerHead) *low = hmin(least), *high = hmax(most);
}

KTX_INLINE vf inverse_or_zero(vf step) { return select_lt(zero(), step, set1(1.f) / step, zero()); }
KTX_INLINE vf to_byte_range(vf x) { return vmin(vmax(x, zero()), set1(255.f)); }
KTX_INLINE vf round_down(vf x) {
  const vf near = round_even(x);
  return near - select_lt(x, near, set1(1.f), zero());
}

// Ranges of `n` groups -> parameters in the page (`bytes`, `base` as Params), that cover them; the minimum as it reads
// back to low[], and the inverse of the scale to high[]. Both have room up to a multiple of W.
static void make_params(int n, int bits, uint8_t* scales, uint8_t* minima, uint16_t* base, float* low, float* high) {
  const vf levels = set1(float((1 << bits) - 1));
  for (int i = n; i % W; i++) low[i] = low[0], high[i] = high[0];
  if (!base) {
    alignas(64) uint16_t half[2][W];
    for (int i = 0; i < n; i += W) {
      const size_t size = 2 * min_of(W, n - i);
      store_f16_toward<false>(half[0], load(low + i));
      const vf minimum = load_f16(half[0]);
      store_f16_toward<true>(half[1], (load(high + i) - minimum) / levels);
      store(low + i, minimum), store(high + i, inverse_or_zero(load_f16(half[1])));
      std::memcpy(minima + 2 * i, half[0], size), std::memcpy(scales + 2 * i, half[1], size);
    }
    return;
  }
  const auto put = [&](uint8_t* to, int i, vf x) {
    uint8_t byte[W];
    store_low8(byte, to_int(x));
    std::memcpy(to + i, byte, min_of(W, n - i));
  };
  vf first = load(low), last = first, most = zero();
  for (int i = W; i < n; i += W) first = vmin(first, load(low + i)), last = vmax(last, load(low + i));
  base[1] = f32_to_f16_toward<false>(hmin(first));
  const float least = f16_to_f32(base[1]);
  base[2] = f32_to_f16_toward<true>((hmax(last) - least) / 255.f);
  const vf from = set1(least), unit = set1(f16_to_f32(base[2])), inverse = inverse_or_zero(unit);
  for (int i = 0; i < n; i += W) {
    const vf x = load(low + i);
    vf step = to_byte_range(round_down((x - from) * inverse));
    step = vmax(step - select_lt(x, fmadd(unit, step, from), set1(1.f), zero()), zero());  // where the difference rounded
    const vf minimum = fmadd(unit, step, from), need = vmax((load(high + i) - minimum) / levels, zero());
    put(minima, i, step);
    store(low + i, minimum), store(high + i, need);
    most = vmax(most, need);
  }
  base[0] = f32_to_f16_toward<true>(hmax(most) / 255.f);
  const vf scale_unit = set1(f16_to_f32(base[0])), scale_inverse = inverse_or_zero(scale_unit);
  for (int i = 0; i < n; i += W) {
    const vf code = to_byte_range(zero() - round_down(zero() - load(high + i) * scale_inverse));
    put(scales, i, code);
    store(high + i, inverse_or_zero(scale_unit * code));
  }
}

static void make_codes(const float* x, int tokens, int dim, int bits, int method, int group, const float* minimum,
                       const float* inverse, uint8_t* codes) {
  const vf top = set1(float((1 << bits) - 1));
  const auto encode = [&](int at, vf low, vf scale) {
    const vf y = (load(x + at) - low) * scale;
    store_low8(codes + at, to_int(vmin(vmax(round_even(y), zero()), top)));
  };
  if (method == kPerChannel) {
    for (int from = 0; from < tokens * dim; from += group * dim, minimum += dim, inverse += dim)
      for (int c = 0; c < dim; c += W) {
        const vf low = load(minimum + c), scale = load(inverse + c);
        for (int at = from + c; at < from + group * dim; at += dim) encode(at, low, scale);
      }
    return;
  }
  for (int at = 0; at < tokens * dim; at += group) {
    const vf low = set1(*minimum), scale = set1(*inverse);
    for (int c = 0; c < group; c += W) encode(at + c, low, scale);
    if (method == kPerToken) minimum++, inverse++;
  }
}

// Key codes [tokens][dim] -> the bit planes of layout.py, four channels to a byte-wise operation.
static void pack_key_planes(const uint8_t* codes, int tokens, int dim, int bits, uint8_t* plane0, uint8_t* plane1,
                            uint8_t* low) {
  const int quarter = dim / 4, words = dim / 16, high = bits - 4;
  const auto word = [&](int t, int c) { uint32_t w; std::memcpy(&w, codes + t * dim + c, 4); return w; };
  for (int d4 = 0; d4 < words; d4++)
    for (int t = 0; t < tokens; t++) {
      uint32_t p0 = 0, p1 = 0;
      for (int k = 0; k < 4; k++) {
        const uint32_t w = word(t, k * quarter + 4 * d4);
        p0 |= (w >> (high + 2) & 0x03030303u) << 2 * k;
        p1 |= (w >> high & 0x03030303u) << 2 * k;
      }
      std::memcpy(plane0 + (d4 * tokens + t) * 4, &p0, 4);
      std::memcpy(plane1 + (d4 * tokens + t) * 4, &p1, 4);
    }
  if (bits == 8)
    for (int d4 = 0; d4 < 2 * words; d4++)
      for (int t = 0; t < tokens; t++) {
        const uint32_t p = (word(t, 4 * d4) & 0x0F0F0F0Fu) | (word(t, dim / 2 + 4 * d4) & 0x0F0F0F0Fu) << 4;
        std::memcpy(low + (d4 * tokens + t) * 4, &p, 4);
      }
}

static void pack_value_codes(const uint8_t* codes, int tokens, int dim, int bits, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, codes, size_t(tokens) * dim);
    return;
  }
  for (int i = 0; i < tokens * dim; i += 16) {
    uint64_t low, high;
    std::memcpy(&low, codes + i, 8);
    std::memcpy(&high, codes + i + 8, 8);
    low |= high << 4;
    std::memcpy(out + i / 2, &low, 8);
  }
}

// int8 mean and deviation of the keys' channels, with their fp16 scales. `stat` has room for 2*dim floats.
static void make_header(const float* x, int tokens, int dim, float* stat, uint8_t* header) {
  float *mean = stat, *deviation = stat + dim;
  const vf count = set1(float(tokens));
  for (int c = 0; c < dim; c += W) {
    vf sum = zero(), squares = zero();
    for (int t = 0; t < tokens; t++) sum = sum + load(x + t * dim + c);
    const vf m = sum / count;
    for (int t = 0; t < tokens; t++) {
      const vf d = load(x + t * dim + c) - m;
      squares = fmadd(d, d, squares);
    }
    store(mean + c, m);
    store(deviation + c, squares / count);
  }
  for (int c = 0; c < dim; c++) deviation[c] = __builtin_sqrtf(deviation[c]);
  for (int part = 0; part < 2; part++) {
    const float* s = stat + part * dim;
    float top = 0;
    for (int c = 0; c < dim; c++) top = max_of(top, __builtin_fabsf(s[c]));
    const uint16_t scale = f32_to_f16_toward<true>(top / 127.f);
    const vf inverse = inverse_or_zero(set1(f16_to_f32(scale)));
    for (int c = 0; c < dim; c += W) {
      const vf y = vmin(vmax(round_even(load(s + c) * inverse), set1(-127.f)), set1(127.f));
      store_low8(header + part * dim + c, to_int(y));
    }
    std::memcpy(header + 2 * dim + 2 * part, &scale, 2);
  }
}

static void seal_quantized(const SealArgs& a, int page, int head, uint8_t* header, uint8_t* payload) {
  const Layout& lay = *a.layout;
  const int tokens = lay.page_size, dim = lay.head_dim, unit = lay.scale_bits / 8;
  const HeadPage hp = head_page(lay, payload, head);
  const auto byte = [](const uint8_t* p) { return const_cast<uint8_t*>(p); };
  const int64_t k_entries = lay.k_scale.head_bytes / unit, v_entries = lay.v_scale.head_bytes / unit;
  const int64_t room = (max_of(max_of(k_entries, v_entries), int64_t(dim)) + 15) / 16 * 16;
  float* x = thread_workspace().get<float>(kSeal, size_t(tokens) * dim * 2 + 2 * room);
  float *low = x + size_t(tokens) * dim, *high = low + room;
  uint8_t* codes = reinterpret_cast<uint8_t*>(high + room);
  const int64_t first = a.src[page] + head * a.head_stride;
  const auto gather = [&](const void* src) {
    with_dtype(a.dtype, [&](auto dt) { gather_tokens<dt.value>(src, first, a.token_stride, tokens, dim, x); });
  };
  const auto quantize = [&](int bits, int method, int group, int entries, const Params& p) {
    find_range(x, tokens, dim, method, group, low, high);
    make_params(entries, bits, byte(p.scale), byte(p.minimum), const_cast<uint16_t*>(p.base), low, high);
    make_codes(x, tokens, dim, bits, method, group, low, high, codes);
  };

  gather(a.k);
  make_header(x, tokens, dim, low, header + head * lay.header_head_bytes);
  quantize(lay.k_bits, lay.k_method, lay.k_group, k_entries, hp.k);
  pack_key_planes(codes, tokens, dim, lay.k_bits, byte(hp.plane0), byte(hp.plane1), byte(hp.low));

  gather(a.v);
  if (lay.v_rotate) {
    for (int t = 0; t < tokens; t++) hadamard(x + t * dim, dim);
    for (int i = 0; i < tokens * dim; i += W)  // a rotated vector can be longer than the fp16 range
      store(x + i, vmin(vmax(load(x + i), set1(-65504.f)), set1(65504.f)));
  }
  quantize(lay.v_bits, lay.v_method, lay.v_group, v_entries, hp.v);
  pack_value_codes(codes, tokens, dim, lay.v_bits, byte(hp.v_codes));
}

static void seal_plain(const SealArgs& a, int page, int head, uint8_t* payload) {
  const Layout& lay = *a.layout;
  const int64_t unit = dtype_bytes(a.dtype), row = lay.head_dim * unit, heads = lay.num_kv_heads;
  for (int side = 0; side < 2; side++) {
    const char* src = static_cast<const char*>(side ? a.v : a.k) + (a.src[page] + head * a.head_stride) * unit;
    uint8_t* dst = payload + (side * heads + head) * lay.page_size * row;
    for (int t = 0; t < lay.page_size; t++) std::memcpy(dst + t * row, src + t * a.token_stride * unit, row);
  }
}

static int32_t seal(const SealArgs* args) {
  const SealArgs& a = *args;
  const int heads = a.layout->num_kv_heads, tasks = a.num_pages * heads;
  const int threads = tasks < 4 ? 1 : thread_count(a.num_threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int task = 0; task < tasks; task++) {
    const int page = task / heads, head = task % heads, block = a.block[page];
    uint8_t* payload = a.payload + int64_t(a.slot ? a.slot[page] : block) * a.payload_stride;
    if (a.layout->k_bits == 16) seal_plain(a, page, head, payload);
    else seal_quantized(a, page, head, a.header + block * a.header_stride, payload);
  }
  return 0;
}

static int32_t append(const AppendArgs* args) {
  const AppendArgs& a = *args;
  const Layout& lay = *a.layout;
  const int64_t unit = dtype_bytes(a.dtype), row = lay.head_dim * unit, plane = lay.page_size * row;
  const int heads = lay.num_kv_heads;
  // A decode step appends a few rows: waking the other threads would cost more than copying them.
  const int threads = int64_t(a.num_rows) * heads * row < (1 << 18) ? 1 : thread_count(a.num_threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int i = 0; i < a.num_rows; i++) {
    uint8_t* page = a.open_pages + a.slot[i] * a.open_stride + a.offset[i] * row;
    for (int head = 0; head < heads; head++) {
      const int64_t at = (a.token[i] * a.token_stride + head * a.head_stride) * unit;
      std::memcpy(page + head * plane, static_cast<const char*>(a.k) + at, row);
      std::memcpy(page + (heads + head) * plane, static_cast<const char*>(a.v) + at, row);
    }
  }
  return 0;
}

}  // namespace KTX_NS
