"""Kernel predictors after nn-Meter: fusion rules of a backend, kernel times by shape, a model as the sum of its kernels."""
