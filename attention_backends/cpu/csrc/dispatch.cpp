// The exported functions: pick the best ISA this CPU and this build have, once, and call its table.
#include "ktx.h"

#include <cstring>

#ifndef KTX_HAVE_AVX2
#define KTX_HAVE_AVX2 0
#endif
#ifndef KTX_HAVE_AVX512
#define KTX_HAVE_AVX512 0
#endif

#if KTX_HAVE_AVX512
namespace ktx_avx512 { extern const ktx::Kernels kernels; }
#endif
#if KTX_HAVE_AVX2
namespace ktx_avx2 { extern const ktx::Kernels kernels; }
#endif
namespace ktx_portable { extern const ktx::Kernels kernels; }

namespace {

// The table by that name if the CPU can run it; by nullptr: the fastest.
const ktx::Kernels* find(const char* name) {
  const auto wanted = [name](const ktx::Kernels& k) { return !name || !std::strcmp(name, k.name); };
#if KTX_HAVE_AVX512 || KTX_HAVE_AVX2
  __builtin_cpu_init();
#endif
#if KTX_HAVE_AVX512
  // AVX512_BF16 is not needed: prefill asks for it where it would use it.
  if (wanted(ktx_avx512::kernels) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return &ktx_avx512::kernels;
#endif
#if KTX_HAVE_AVX2
  if (wanted(ktx_avx2::kernels) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return &ktx_avx2::kernels;
#endif
  return wanted(ktx_portable::kernels) ? &ktx_portable::kernels : nullptr;
}

const ktx::Kernels* chosen = nullptr;  // set by the first call or by ktx_set_isa; racing first calls store the same

const ktx::Kernels* table() {
  const ktx::Kernels* t = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
  if (!t) __atomic_store_n(&chosen, t = find(nullptr), __ATOMIC_RELEASE);
  return t;
}

}  // namespace

int32_t ktx_abi_version() { return KTX_ABI_VERSION; }

int64_t ktx_abi_size(int32_t which) {
  const int64_t sizes[] = {sizeof(ktx::Layout), sizeof(ktx::SealArgs), sizeof(ktx::AppendArgs),
                           sizeof(ktx::AttentionArgs), sizeof(ktx::SparseArgs), sizeof(ktx::Residency)};
  return which >= 0 && which < 6 ? sizes[which] : -1;
}

const char* ktx_isa() { return table()->name; }

int32_t ktx_set_isa(const char* name) {
  const ktx::Kernels* t = find(name);
  if (!t) return -1;
  __atomic_store_n(&chosen, t, __ATOMIC_RELEASE);
  return 0;
}

int32_t ktx_seal(const ktx::SealArgs* args) { return table()->seal(args); }
int32_t ktx_append(const ktx::AppendArgs* args) { return table()->append(args); }
int32_t ktx_attention(const ktx::AttentionArgs* args) { return table()->attention(args); }
