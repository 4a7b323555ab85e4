"""The decisions of CARMA, pure: no clock, no files, no processes, no threads, no logging. Time comes with events."""
