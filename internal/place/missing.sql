-- What a schema lacks of what the migrations make there: a row for each, such as "table
-- pgxlock_waiters". A function stands with the number of its arguments. Columns, indexes
-- and the text of functions are not looked at.
-- $1 schema, $2 its version
WITH there AS MATERIALIZED (
  SELECT 'function' AS kind, p.proname || '/' || p.pronargs AS name
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1::text
  UNION ALL
  SELECT CASE c.relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view' WHEN 'S' THEN 'sequence' END, c.relname
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1::text
)
SELECT w.kind || ' ' || split_part(o.name, '/', 1)
  FROM (VALUES
         (1, 'table', 'distributed_locks pgxlock_epoch pgxlock_migrations pgxlock_since_crash'),
         (1, 'view', 'lock_leases'),
         (1, 'sequence', 'pgxlock_tokens'),
         (1, 'function', 'acquire_lock/4 advisory_lock_key/1 advisory_lock_key_in/2 assert_lock_held/4 extend_lock/3
                          pgxlock_acquire_each/4 pgxlock_before/2 pgxlock_check/2 pgxlock_check_code/1 pgxlock_check_primary/1
                          pgxlock_check_read_committed/1 pgxlock_check_try/4 pgxlock_check_unused/0 pgxlock_durable/1
                          pgxlock_is_own_key/2 pgxlock_key/2 pgxlock_migrate/3 pgxlock_next_tokens/1
                          pgxlock_own_key/2 pgxlock_release/3 pgxlock_rename/3 pgxlock_renew/4 pgxlock_renew_batch/4 pgxlock_require/2
                          pgxlock_system_identifier/0 pgxlock_timeline/0 pgxlock_ttl/2 pgxlock_version/0
                          reap_expired_locks/2 release_lock/2 release_lock_fenced/3 renew_lock/4
                          repair_lock_tokens/0 try_acquire_lock/4'),
         (2, 'table', 'pgxlock_claims'),
         (2, 'function', 'answer_request/3 claim_once/3 claim_request/4 lock_tx/4 pgxlock_deadline/1
                          pgxlock_lock_timeout/1 purge_claims/2'),
         (3, 'table', 'pgxlock_advisory_locks pgxlock_names'),
         (3, 'function', 'assert_advisory_lock_held/4 pgxlock_advisory_batch/3 pgxlock_advisory_call/2
                          pgxlock_advisory_pin/3 pgxlock_clear_advisory/1 pgxlock_publish_names/2
                          pgxlock_reap_advisory/2 pgxlock_session_key/1'),
         (4, 'table', 'pgxlock_waiters'),
         (4, 'sequence', 'pgxlock_tickets'),
         (4, 'function', 'acquire_in_turn/5 leave_queue/2 pgxlock_acquire_batch/5 pgxlock_acquire_one/5 pgxlock_change_pending/1
                          pgxlock_deadlocks/3 pgxlock_first_ahead/3 pgxlock_full_xid/1 pgxlock_notify_holders/2 pgxlock_publish_batch/9
                          pgxlock_reap_waiters/1 pgxlock_refused_batch/3 pgxlock_release_batch/3 pgxlock_release_one/3
                          pgxlock_remove_dead/3 pgxlock_settle_tickets/4 pgxlock_try_in_turn/6 pgxlock_waited_for/2
                          pgxlock_wait_in_turn/8 pgxlock_waiter_dead/2 pgxlock_waiter_key/1 pgxlock_wake_batch/3 pgxlock_wake_timed_out/1
                          pgxlock_withdraw_batch/3 wake_lock_waiter/1'),
         (5, 'table', 'distributed_lock_shares pgxlock_semaphores'),
         (5, 'view', 'lock_shares'),
         (5, 'function', 'acquire_permit/5 acquire_permits_in_turn/7 acquire_shared_in_turn/5 acquire_shared_lock/4 assert_shared_lock_held/4 extend_shared_lock/3
                          pgxlock_change_lease/7 pgxlock_check_semaphore/2 pgxlock_holders/1 pgxlock_lock_group/2 pgxlock_permit_batch/7 pgxlock_reap_shares/2
                          pgxlock_release_share/4 pgxlock_release_shares_batch/3
                          pgxlock_renew_shares_batch/4 pgxlock_share_held/5
                          pgxlock_share_pin/2 release_all_locks/1 release_shared_lock/2 try_acquire_shared_lock/4'),
         (6, 'table', 'pgxlock_runs'),
         (6, 'function', 'finish_run/3 forget_run/2 list_runs/2 pgxlock_due_runs/7 pgxlock_finish_run/5 pgxlock_run_near/7 pgxlock_slot/5
                          pgxlock_start_run/9 start_run/5 start_run_at/2'),
         (7, 'table', 'pgxlock_limits'),
         (7, 'function', 'allow_rate/4 pgxlock_limit_batch/6 pgxlock_limit_clock/0 pgxlock_reap_limits/2
                          reserve_rate/5'),
         (8, 'table', 'pgxlock_evictions pgxlock_step_down'),
         (8, 'view', 'lock_holders lock_waiters'),
         (8, 'function', 'ask_to_step_down/2 evict_advisory_lock/5 evict_lock/4 grant_locks/2 harden_locks/0
                          pgxlock_apply_rights/1 pgxlock_ask_to_step_down/4 pgxlock_check_owner/0
                          pgxlock_evicted/4 pgxlock_grants/0 pgxlock_hardened/0 pgxlock_list_names/0
                          pgxlock_list_tickets/0 pgxlock_list_tokens/0 pgxlock_objects/0
                          pgxlock_record_eviction/6 pgxlock_revoke/2 pgxlock_rights/0 pgxlock_step_downs/3
                          reset_lock_state/2 revoke_locks/1 soften_locks/0')
       ) AS w (version, kind, names), regexp_split_to_table(w.names, '[[:space:]]+') AS o (name)
 WHERE w.version <= $2::integer AND NOT EXISTS (SELECT FROM there t WHERE t.kind = w.kind AND t.name = o.name)
 ORDER BY w.kind <> 'table', w.version, o.name
