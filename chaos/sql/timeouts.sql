ALTER ROLE chaos_app SET statement_timeout = '100ms';
ALTER ROLE chaos_app SET lock_timeout = '30ms';
