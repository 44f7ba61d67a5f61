"""The decode loop: requests, pages and programs on the host, and the device functions below."""
