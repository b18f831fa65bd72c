"""What `auto` stands for in a run file where no model and no device decides it, for who runs it and who plans it."""

AUTO_MICRO_BATCH_TOKENS = 4096
"""train.micro_batch_tokens: tokens of a micro-batch, where no document is longer and a step has as many."""
