"""DeepSpeed ZeRO: stages 1 to 3 behind the same record as every strategy."""
