"""The GPU kernels, in Triton, on the page format of `kv_quant/layout.py`. Importing this imports no triton."""
