#define KTX_NS ktx_avx2
#define KTX_NAME "avx2"
#include "kernels.inc"
