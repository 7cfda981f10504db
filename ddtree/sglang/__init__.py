"""DDTree inside SGLang: an out-of-tree speculative algorithm, `--speculative-algorithm DDTREE` (docs/sglang.md).

SGLang loads `plugin.register` by the entry point group `sglang.srt.plugins`. Only this room may import sglang.
"""
