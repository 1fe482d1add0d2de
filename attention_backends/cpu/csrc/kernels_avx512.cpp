#define KTX_NS ktx_avx512
#define KTX_NAME "avx512"
#include "kernels.inc"
