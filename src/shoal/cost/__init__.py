"""Cost of jobs: profiles, estimates of time, memory and demand, and the job history on disk."""
