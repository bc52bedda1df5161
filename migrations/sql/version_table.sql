-- Makes the version table, as golang-migrate would, but under the lock that the
-- files take: so a file that somebody else just runs is waited for.
DO $$
DECLARE
  v_schema text := current_schema();
BEGIN
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  IF to_regclass(pg_catalog.format('%I.pgxlock_migrations', v_schema)) IS NULL THEN
    CREATE TABLE pgxlock_migrations (version bigint NOT NULL PRIMARY KEY, dirty boolean NOT NULL);
  END IF;
EXCEPTION WHEN duplicate_table OR unique_violation THEN
  NULL;                                     -- golang-migrate, run by somebody else, was faster
END $$
