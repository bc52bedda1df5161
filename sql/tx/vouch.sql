-- Answers, by tx/answer.sql, whether the caller's snapshot shows every commit: 1; or 0: a
-- transaction committed after the snapshot was taken, which may have been one that had the
-- lock before us. Commits are marked before locks are released, so none is missed.
-- Transactions that are still running have not released the lock, and do not count. Run it
-- after the grant. It draws no transaction id, and costs a fraction of a microsecond for
-- each id that was given out since the snapshot and did not commit.
DO $$
DECLARE
  v_snapshot pg_catalog.pg_snapshot := pg_catalog.pg_current_snapshot();
  v_next     bigint := pg_catalog.pg_snapshot_xmax(v_snapshot)::text::bigint;
BEGIN
  -- A snapshot from before the promotion of a standby does not tell who was running.
  IF NOT (pg_catalog.pg_snapshot_xmin(v_snapshot)::text::bigint < v_next AND pg_catalog.pg_current_xact_id_if_assigned() IS NULL
          AND NOT EXISTS (SELECT FROM pg_catalog.pg_snapshot_xip(v_snapshot)))
     AND NOT EXISTS (SELECT FROM pg_catalog.pg_snapshot_xip(v_snapshot) x WHERE pg_catalog.pg_xact_status(x) = 'committed') THEN
    LOOP                                    -- those that began after it
      EXIT WHEN pg_catalog.pg_xact_status(v_next::text::pg_catalog.xid8) = 'committed';
      v_next := v_next + 1::bigint;
    END LOOP;
  END IF;
  PERFORM pg_catalog.set_config('pgxlock.answer', '0', true);
EXCEPTION WHEN invalid_parameter_value THEN  -- that id was given to nobody yet: we saw all
  PERFORM pg_catalog.set_config('pgxlock.answer', '1', true);
END $$
