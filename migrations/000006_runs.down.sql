-- Takes away what 000006_runs.up.sql installed.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  IF NOT EXISTS (SELECT FROM pg_proc p
                  WHERE p.oid = to_regprocedure(quote_ident(v_schema) || '.pgxlock_migrate(text, integer, text)')::oid
                                         AND pg_get_userbyid(p.proowner) = current_user) THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 1, or it belongs to another role',
        coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'insufficient_privilege',
            HINT = 'Name the schema first in search_path, SET ROLE to the owner, and run the files in order.';
  END IF;
  PERFORM set_config('search_path', format('%I, pg_temp', v_schema), true);
  PERFORM pgxlock_migrate('down'::text, 6, v_path);

  DROP FUNCTION start_run(text, interval, interval, text, text), start_run_at(text, timestamptz),
    finish_run(text, timestamptz, text), forget_run(text, timestamptz), list_runs(text, integer),
    pgxlock_run_near(text, timestamptz, interval, interval, text, boolean, text),
    pgxlock_due_runs(text, interval, interval, text, integer, boolean, text),
    pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text, text),
    pgxlock_finish_run(text, timestamptz, text, text, text), pgxlock_slot(timestamptz, interval, interval, text, integer);
  DROP TABLE pgxlock_runs;

  PERFORM pgxlock_migrate('removed'::text, 5, v_path);
END $migration$;
