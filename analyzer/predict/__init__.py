"""Predicted time of a step, here and on other devices: roofline, MFU tables, kernel predictors, what-if simulator."""
