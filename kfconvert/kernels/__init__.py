"""The implementations of the operators one by one; ``kfconvert.ops`` picks the fastest for a device."""
