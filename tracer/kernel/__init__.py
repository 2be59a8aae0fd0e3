"""The BPF object in Python: constants and layouts by name, the kernel's features, names of counters, plan files."""
