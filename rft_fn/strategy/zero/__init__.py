"""DeepSpeed ZeRO: stages 1 to 3 as one strategy."""
