"""Authentication and authorization: certificates, the roles in them, the calls that each role may make; quotas."""
