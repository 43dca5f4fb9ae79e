"""Stand-ins on `PYTHONPATH` of SGLang's processes for what it imports and a CPU has not.

Not imported as `vagen.tools.sglang_cpu.stubs`: Python runs `sitecustomize` at each start of an interpreter, which also
covers the processes that SGLang spawns, and SGLang imports `sgl_kernel` from here.
"""
