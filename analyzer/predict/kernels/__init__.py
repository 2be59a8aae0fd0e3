"""Kernel predictors after nn-Meter: what a backend fuses, what a kernel costs by shape, a model as the sum of its kernels."""
