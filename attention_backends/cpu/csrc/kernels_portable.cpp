#define KTX_NS ktx_portable
#define KTX_NAME "portable"
#include "kernels.inc"
