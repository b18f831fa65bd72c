#!/bin/bash
swift export --adapters output/run/checkpoint-800 --merge_lora true --output_dir output/merged --safe_serialization true
