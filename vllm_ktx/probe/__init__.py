"""`vllm-ktx probe`: measures which page format fits a model, and keeps the decision for `format: auto`."""
