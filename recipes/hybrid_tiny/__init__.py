"""hybrid-tiny: a small Qwen3.5-architecture target and its drafter, trained from scratch."""
