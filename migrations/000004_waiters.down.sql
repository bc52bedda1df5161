-- Takes away what 000004_waiters.up.sql installed.
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
  PERFORM pgxlock_migrate('down'::text, 4, v_path);

  DROP FUNCTION pgxlock_waiter_dead(bigint, timestamptz),
    pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint, integer),
    pgxlock_withdraw_batch(integer[], text[], bigint[]),
    pgxlock_acquire_batch(text[], text[], bigint[], text[], bigint[]),
    pgxlock_acquire_one(text, text, bigint, text, bigint), pgxlock_release_one(text, text, bigint),
    pgxlock_try_in_turn(text[], text[], bigint[], text[], bigint[], boolean), pgxlock_change_pending(xid),
    pgxlock_release_batch(text[], text[], bigint[]), pgxlock_wake_batch(integer[], text[], bigint[]),
    pgxlock_deadlocks(integer[], text[], bigint[]), acquire_in_turn(varchar, varchar, integer, bigint, jsonb),
    pgxlock_wait_in_turn(text, text, integer, bigint, jsonb, boolean, integer, integer),
    leave_queue(varchar, varchar), pgxlock_full_xid(xid),
    wake_lock_waiter(varchar), pgxlock_refused_batch(integer[], text[], bigint[]), pgxlock_waited_for(integer[], text[]),
    pgxlock_notify_holders(integer[], bigint[]), pgxlock_reap_waiters(integer),
    pgxlock_first_ahead(integer, text, bigint), pgxlock_settle_tickets(text[], bigint[], boolean[], bigint[]),
    pgxlock_remove_dead(integer[], text[], bigint[]), pgxlock_waiter_key(bigint), pgxlock_wake_timed_out(timestamptz);
  DROP TABLE pgxlock_waiters;
  DROP SEQUENCE pgxlock_tickets;

  PERFORM pgxlock_migrate('removed'::text, 3, v_path);
END $migration$;
