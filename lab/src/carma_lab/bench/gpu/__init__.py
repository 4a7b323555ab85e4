"""Measurements that only a real GPU can give. torch is imported by the workers alone, from whatever is installed."""
