"""The checkpoint engine; it has never heard of Lightning."""
