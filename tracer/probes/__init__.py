"""Where probes are placed, and why there: ELF files, symbols, stripped programs, instructions, learnt loops, tracepoints."""
