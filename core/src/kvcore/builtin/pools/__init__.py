"""Pool construction: memfd arenas for the CPU, arenas of torch for CUDA."""
