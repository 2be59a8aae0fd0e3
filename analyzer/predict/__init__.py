"""What a step should take, here and on other devices: roofline, MFU tables, kernel predictors, what-if simulator."""
