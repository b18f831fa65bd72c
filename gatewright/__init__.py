"""Gatewright: plan, train and ship fine-tuned mixture-of-experts language models."""

__version__ = "0.1.0"
