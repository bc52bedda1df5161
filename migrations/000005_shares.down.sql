-- Takes away what 000005_shares.up.sql installed.
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
  PERFORM pgxlock_migrate('down'::text, 5, v_path);

  DROP VIEW lock_shares;
  DROP FUNCTION acquire_shared_lock(varchar, varchar, integer, jsonb),
    try_acquire_shared_lock(varchar, varchar, interval, jsonb), extend_shared_lock(varchar, varchar, integer),
    release_shared_lock(varchar, varchar), release_all_locks(varchar), pgxlock_release_share(text, text, bigint, boolean),
    assert_shared_lock_held(varchar, varchar, bigint, boolean),
    pgxlock_share_held(text, text, bigint, text, bigint),
    pgxlock_change_lease(text, text, bigint, boolean, text, bigint, text),
    pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[]),
    pgxlock_release_shares_batch(text[], text[], bigint[]), pgxlock_holders(text),
    pgxlock_reap_shares(interval, integer), pgxlock_lock_group(text, boolean), pgxlock_share_pin(text, text),
    acquire_shared_in_turn(varchar, varchar, integer, bigint, jsonb),
    acquire_permits_in_turn(varchar, varchar, integer, integer, integer, bigint, jsonb), pgxlock_check_semaphore(text, integer),
    acquire_permit(varchar, varchar, integer, integer, jsonb),
    pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[], integer[]);
  DROP TABLE distributed_lock_shares, pgxlock_semaphores;

  PERFORM pgxlock_migrate('removed'::text, 4, v_path);
END $migration$;
