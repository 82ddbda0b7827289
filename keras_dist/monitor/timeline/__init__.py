"""The timeline of a job: what each rank records of itself, put together, and looked at."""
