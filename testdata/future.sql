-- A version after the newest one, as CONTRIBUTING.md allows it: it only adds, and
-- what it replaces keeps its name, its parameters and its result. For tests of
-- programs that do not know it.
DO $migration$
DECLARE
  v_version bigint := pgxlock_schema_version() + 1;
BEGIN
  PERFORM set_config('lock_timeout', '1s', true);
  ALTER TABLE distributed_locks ADD COLUMN added_later text NOT NULL DEFAULT 'later', ADD COLUMN added_last timestamptz;
  ALTER TABLE pgxlock_claims ADD COLUMN added_later text NOT NULL DEFAULT 'later';
  CREATE TABLE pgxlock_later (id bigint PRIMARY KEY);
  CREATE FUNCTION acquire_lock_later(p_lock_name varchar, p_later text) RETURNS boolean LANGUAGE sql RETURN p_later IS NOT NULL;
  EXECUTE (SELECT string_agg(replace(pg_get_functiondef(p.oid), 'RETURNS boolean', 'RETURNS boolean COST 99'), E';\n' ORDER BY p.oid)
             FROM pg_proc p WHERE p.proname IN ('acquire_lock', 'release_lock', 'claim_once', 'lock_tx') AND p.pronamespace = current_schema()::regnamespace);
  EXECUTE format('CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN %s::bigint', v_version);
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (v_version, false);
END $migration$;
