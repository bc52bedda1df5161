-- Takes away what 000008_monitor_and_rights.up.sql installed. What was hardened is not any
-- more: roles that grant_locks() named have rights on the tables instead.
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
  PERFORM pgxlock_migrate('down'::text, 8, v_path);

  IF pgxlock_hardened() THEN
    PERFORM soften_locks();
  END IF;
  DROP VIEW lock_holders, lock_waiters;
  DROP FUNCTION pgxlock_list_names(), pgxlock_list_tokens(), pgxlock_list_tickets(),
    evict_lock(varchar, varchar, bigint, text), evict_advisory_lock(integer, bigint, text, integer, text),
    pgxlock_evicted(integer[], text[], text[], bigint[]), pgxlock_record_eviction(integer, text, text, bigint, text, text),
    ask_to_step_down(varchar, text), pgxlock_ask_to_step_down(integer, text, text, text),
    pgxlock_step_downs(integer[], text[], text[]), reset_lock_state(text, text), grant_locks(text, text),
    revoke_locks(text), harden_locks(), soften_locks(), pgxlock_apply_rights(boolean), pgxlock_revoke(text, boolean),
    pgxlock_rights(), pgxlock_hardened(), pgxlock_objects(), pgxlock_grants(), pgxlock_check_owner();
  DROP TABLE pgxlock_evictions, pgxlock_step_down;

  PERFORM pgxlock_migrate('removed'::text, 7, v_path);
END $migration$;
