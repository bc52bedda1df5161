-- Takes away what 000002_transactions.up.sql installed.
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
  PERFORM pgxlock_migrate('down'::text, 2, v_path);

  DROP FUNCTION lock_tx(text, interval, boolean, boolean), pgxlock_deadline(interval), pgxlock_lock_timeout(timestamptz),
    claim_once(text, interval, interval), claim_request(text, text, interval, interval),
    answer_request(text, text, bytea), purge_claims(interval, integer);
  DROP TABLE pgxlock_claims;

  PERFORM pgxlock_migrate('removed'::text, 1, v_path);
END $migration$;
