"""Several vLLM servers behind one address: `vllm-ktx serve MODEL --replicas N`.

`affinity` decides where a request goes, `replica` looks after one `vllm serve` child, `ingress` speaks HTTP to clients;
none of the three knows Ray. `app` deploys them with Ray Serve, which places, watches and replaces replicas.
"""
