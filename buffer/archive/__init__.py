"""Saved buffers: trajectories as Parquet files that pandas, DuckDB and Hugging Face `datasets` open as they are.

    ARCHIVE/trajectories-000000.parquet    one row a trajectory; zstd
    ARCHIVE/images-000000.parquet          each distinct image of the archive once, encoded as the engine saw it

A part appears whole or not at all, its images before its trajectories. Import the modules themselves: pyarrow is loaded
with them, so nothing that must start fast imports this package at its top.
"""
