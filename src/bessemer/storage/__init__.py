"""Files on disk and in object stores: atomic writes, locks, checksums, safetensors, remote copies."""
