-- Makes the version table, as golang-migrate would, but under the lock that the
-- files take: so a file that somebody else just runs is waited for.
DO $$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
BEGIN
  PERFORM pg_catalog.set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  BEGIN
    CREATE TABLE IF NOT EXISTS pgxlock_migrations (version bigint NOT NULL PRIMARY KEY, dirty boolean NOT NULL);
  EXCEPTION WHEN duplicate_table OR duplicate_object OR unique_violation THEN
    NULL;                                   -- golang-migrate, run by somebody else, was faster
  END;
  -- golang-migrate is about to write into it, and so to run its triggers. Looked
  -- at after it is there: before, somebody could still make it.
  IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_roles u ON u.oid = c.relowner
                  WHERE c.oid = to_regclass(pg_catalog.format('%I.pgxlock_migrations', v_schema))::oid AND u.rolname = current_user) THEN
    RAISE EXCEPTION 'the table pgxlock_migrations in schema % belongs to another role, %', quote_ident(v_schema),
        (SELECT quote_ident(u.rolname::text) FROM pg_class c JOIN pg_roles u ON u.oid = c.relowner
          WHERE c.oid = to_regclass(pg_catalog.format('%I.pgxlock_migrations', v_schema))::oid)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed pgxlock, and run this again.';
  END IF;
END $$
