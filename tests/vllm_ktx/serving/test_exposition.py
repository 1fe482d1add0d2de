"""Merged metrics parse, keep families together, and say which replica they are from."""

from prometheus_client.parser import text_string_to_metric_families

from vllm_ktx.serving.exposition import free_tokens, merge, values

TEXT = """# HELP vllm:requests_total Requests.
# TYPE vllm:requests_total counter
vllm:requests_total{engine="0",path="/v1/{x}"} 3.0
# HELP vllm:ttft_seconds Time.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.1"} 1.0
vllm:ttft_seconds_bucket{le="+Inf"} 2.0
vllm:ttft_seconds_count 2.0
vllm:ttft_seconds_sum 1.5
plain 7
"""


def test_merge():
    text = merge({"a": TEXT, 'b"': TEXT.replace("3.0", "4.0")})
    assert text.count("# TYPE vllm:requests_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [(s.labels, s.value) for s in families["vllm:requests"].samples] == [
        ({"replica": "a", "engine": "0", "path": "/v1/{x}"}, 3.0),
        ({"replica": 'b"', "engine": "0", "path": "/v1/{x}"}, 4.0),
    ]
    assert families["vllm:ttft_seconds"].type == "histogram" and len(families["vllm:ttft_seconds"].samples) == 8
    assert 'plain{replica="a"} 7\n' in text


def test_values_and_room():
    assert list(values(TEXT, "vllm:ttft_seconds_count")) == [("", 2.0)]
    text = 'vllm:kv_cache_usage_perc{e="0"} 0.25\nvllm:cache_config_info{block_size="64",num_gpu_blocks="100"} 1.0\n'
    assert free_tokens(text) == 4800
    assert free_tokens(TEXT) is None
