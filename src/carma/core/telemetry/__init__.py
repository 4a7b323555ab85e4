"""What samples of GPUs mean: windows, attribution, pace, usage, the watchdog and the shrinking of bookings."""
