"""The job file: its schema, its loading with the origin of each value, and the digest that identifies a job."""
