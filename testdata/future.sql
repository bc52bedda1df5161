-- A version after the newest one, as CONTRIBUTING.md allows it: it only adds, and what it
-- replaces keeps its name, its parameters and its result. For tests of programs that do
-- not know it; and the pattern for the first migration after a release, whose file begins
-- with the check that the others begin with.
DO $migration$
DECLARE
  v_path    text    := current_setting('search_path');
  v_version integer := pgxlock_version()::integer + 1;
BEGIN
  PERFORM pgxlock_migrate('up'::text, v_version, v_path);
  PERFORM set_config('lock_timeout', '1s', true);         -- for the tables that are in use
  ALTER TABLE distributed_locks ADD COLUMN added_later text NOT NULL DEFAULT 'later', ADD COLUMN added_last timestamptz;
  ALTER TABLE pgxlock_claims ADD COLUMN added_later text NOT NULL DEFAULT 'later';
  CREATE TABLE pgxlock_later (id bigint PRIMARY KEY);
  CREATE FUNCTION acquire_lock_later(p_lock_name varchar, p_later text) RETURNS boolean LANGUAGE sql RETURN p_later IS NOT NULL;
  EXECUTE (SELECT string_agg(replace(pg_get_functiondef(p.oid), 'RETURNS boolean', 'RETURNS boolean COST 99'), E';\n' ORDER BY p.oid)
             FROM pg_proc p WHERE p.proname IN ('acquire_lock', 'release_lock', 'claim_once', 'lock_tx') AND p.pronamespace = current_schema()::regnamespace);
  PERFORM pgxlock_migrate('made'::text, v_version, v_path);
END $migration$;
