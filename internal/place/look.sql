-- Where pgxlock is, and which roles can put code of theirs there. The search_path is the role's, so
-- that all is qualified, operators too: nothing of a schema is called before it is known whose it
-- is, and the version is read from the text of a function and not called.
-- Whether the role that asks is a superuser, or its session is one's, and a list of schemas that have
-- pgxlock, which is to have pgxlock_version(), whatever was dropped beside it: the named one, else those on the
-- search_path first, in its order, and of these also one that has an older acquire_lock. Of each the list has the
-- roles, other than superusers, that own it or something in it that has one of pgxlock's names, whatever its
-- arguments are: an overload may be what a call resolves to. Trusted are the owner of the database, whom nspowner may call
-- pg_database_owner (6171), and the owner of the schema that the caller names.
-- Schemas named pg_* are the server's: no role can make one or rename one so, and in the temporary
-- ones nobody installs anything.
-- $1 the schema that the caller names; '' if it names none
-- A role may make any number of schemas, of which the planner knows nothing yet: so objects are grouped by their
-- schemas, and joined to nothing that the role can make more of.
WITH object AS (
  SELECT p.pronamespace AS schema, p.proowner AS owner, pg_catalog.concat('function ', p.proname) AS name,
         CASE WHEN p.pronargs OPERATOR(pg_catalog.=) 0::pg_catalog.int2
               AND p.proname OPERATOR(pg_catalog.=) 'pgxlock_version'::pg_catalog.name THEN p.oid END AS version,
         p.proname OPERATOR(pg_catalog.=) 'acquire_lock'::pg_catalog.name
           AND p.proargtypes OPERATOR(pg_catalog.=) '1043 1043 23 3802'::pg_catalog.oidvector AS acquires,         -- varchar, varchar, integer, jsonb
         NULL::pg_catalog.text AS nspname
    FROM pg_catalog.pg_proc p
   WHERE p.proname OPERATOR(pg_catalog.>=) 'pgxlock_'::pg_catalog.name AND p.proname OPERATOR(pg_catalog.<) 'pgxlock`'::pg_catalog.name
      OR p.proname OPERATOR(pg_catalog.=) ANY ('{
           acquire_in_turn, acquire_lock, acquire_permit, acquire_permits_in_turn, acquire_shared_in_turn, acquire_shared_lock, advisory_lock_key, advisory_lock_key_in, allow_rate,
           answer_request, ask_to_step_down,
           assert_advisory_lock_held,
           assert_lock_held, assert_shared_lock_held, claim_once, claim_request, evict_advisory_lock, evict_lock, extend_lock, extend_shared_lock, finish_run,
           forget_run, grant_locks, harden_locks, leave_queue,
           list_runs, lock_tx, purge_claims, reap_expired_locks, release_all_locks, release_lock,
           release_lock_fenced, release_shared_lock, renew_lock, repair_lock_tokens, reserve_rate, reset_lock_state, revoke_locks, soften_locks, start_run,
           start_run_at, try_acquire_lock, try_acquire_shared_lock, wake_lock_waiter}'::pg_catalog.name[])
  UNION ALL                                 -- a view calls what its owner says, as the role that reads it
  SELECT c.relnamespace, c.relowner,
         pg_catalog.concat(CASE WHEN c.relkind OPERATOR(pg_catalog.=) 'v'::pg_catalog."char" THEN 'view '
                                WHEN c.relkind OPERATOR(pg_catalog.=) 'S'::pg_catalog."char" THEN 'sequence ' ELSE 'table ' END, c.relname),
         NULL, NULL, NULL
    FROM pg_catalog.pg_class c
   WHERE (c.relname OPERATOR(pg_catalog.>=) 'pgxlock_'::pg_catalog.name AND c.relname OPERATOR(pg_catalog.<) 'pgxlock`'::pg_catalog.name
          OR c.relname OPERATOR(pg_catalog.=) ANY ('{distributed_lock_shares, distributed_locks, lock_holders, lock_leases, lock_shares, lock_waiters}'::pg_catalog.name[]))
     AND c.relkind OPERATOR(pg_catalog.=) ANY ('{r,p,f,v,m,S}'::pg_catalog."char"[])
  UNION ALL                                 -- it can drop what is in it, and make it anew
  SELECT n.oid, n.nspowner, 'schema ', NULL, NULL, n.nspname::pg_catalog.text
    FROM pg_catalog.pg_namespace n
   WHERE NOT pg_catalog.starts_with(n.nspname::pg_catalog.text, 'pg_')
), share AS MATERIALIZED (                 -- before roles are looked up, of which a server may have many
  SELECT o.schema, d.datdba, CASE WHEN o.owner OPERATOR(pg_catalog.=) 6171::pg_catalog.oid THEN d.datdba ELSE o.owner END AS owner,
         pg_catalog.min(o.name) AS object, pg_catalog.max(o.version) AS version, pg_catalog.bool_or(o.acquires) AS acquires,
         pg_catalog.max(o.nspname)::pg_catalog.name AS nspname
    FROM object o
    JOIN pg_catalog.pg_database d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
   GROUP BY 1, 2, 3
), owner AS (
  SELECT s.schema, s.version, s.acquires, s.nspname, r.rolname AS role, s.object, r.rolsuper AS super,
         r.rolsuper OR s.owner OPERATOR(pg_catalog.=) s.datdba OR $1::pg_catalog.text OPERATOR(pg_catalog.<>) '' AND s.nspname IS NOT NULL AS trusted
    FROM share s JOIN pg_catalog.pg_roles r ON r.oid OPERATOR(pg_catalog.=) s.owner
), candidate AS (
  SELECT o.schema AS oid, pg_catalog.max(o.version) AS version, pg_catalog.max(o.nspname::pg_catalog.text)::pg_catalog.name AS nspname,
         pg_catalog.bool_or(o.acquires) AS acquires, pg_catalog.bool_and(o.trusted) AS trusted,
         pg_catalog.json_agg(pg_catalog.json_build_object('role', o.role, 'object', o.object, 'schema', o.nspname IS NOT NULL, 'trusted', o.trusted) ORDER BY o.trusted, o.role)
           FILTER (WHERE NOT o.super) AS owners
    FROM owner o GROUP BY 1
), place AS (
  SELECT c.nspname AS name, pg_catalog.array_position(pg_catalog.current_schemas(false), c.nspname) AS rank, c.version IS NULL AS older,
         coalesce(pg_catalog.has_schema_privilege(c.oid, 'USAGE') AND pg_catalog.has_function_privilege(c.version, 'EXECUTE'), false) AS usable,
         CASE WHEN c.trusted               -- only then
              THEN coalesce(pg_catalog.substring(pg_catalog.pg_get_function_sqlbody(c.version), '[0-9]{1,9}')::pg_catalog.int4, 0)
              ELSE 0 END AS version,
         coalesce(c.owners, '[]') AS owners
    FROM candidate c
   WHERE c.nspname IS NOT NULL
     AND CASE WHEN $1::pg_catalog.text OPERATOR(pg_catalog.<>) '' THEN c.nspname OPERATOR(pg_catalog.=) $1::pg_catalog.text::pg_catalog.name AND c.version IS NOT NULL
              ELSE c.version IS NOT NULL OR c.acquires AND c.nspname OPERATOR(pg_catalog.=) ANY (pg_catalog.current_schemas(false)) END
)
SELECT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolsuper AND (r.rolname OPERATOR(pg_catalog.=) current_user OR r.rolname OPERATOR(pg_catalog.=) session_user)),
       (SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_object('name', p.name, 'rank', coalesce(p.rank, 0), 'older', p.older,
                                              'usable', p.usable, 'version', p.version, 'owners', p.owners) ORDER BY p.rank, p.name), '[]') FROM place p)
