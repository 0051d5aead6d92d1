"""Who may talk to whom: certificates, the roles in them, and what each role may ask for."""
