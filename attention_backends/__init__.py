"""The KTX attention backend and its kernels. Only `ktx.py` imports vLLM; kernels and reference stand on torch alone."""
