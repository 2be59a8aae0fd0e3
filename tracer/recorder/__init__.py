"""The recorder, in C (begin with `main.c`): loads and attaches programs, drains the kernel's buffers, writes the recording."""
