"""SGLang on a CPU, for tests and demos: its requirements, stand-ins for its GPU packages, and a launcher."""
