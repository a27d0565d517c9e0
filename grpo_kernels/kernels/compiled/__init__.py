"""The backends in C++ and CUDA, behind the compiled modules _cpu and _cuda."""
