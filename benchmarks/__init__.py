"""Benchmarks and the material they run on: one command a figure, results as JSON. Never imported by the plugin."""
