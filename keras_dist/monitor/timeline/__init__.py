"""The timeline of a job: recording on each rank, one trace of all ranks, and summaries."""
